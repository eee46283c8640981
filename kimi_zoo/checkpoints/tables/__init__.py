"""One table per family: its parameters beside the names published checkpoints give them."""
