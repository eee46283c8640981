"""Layers: one concept per file, its cache class beside it."""
