"""Fine-tuning: text to packed rows, rows to a loss, a loss to an optax step; and a run that survives being stopped."""
