"""Pure functions of arrays: no modules, configs, caches or PRNG keys."""
