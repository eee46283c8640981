"""Many devices: the mesh, how parameters and tokens are spread over it, and running a model on it."""
