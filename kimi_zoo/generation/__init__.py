"""Sampling and the decoding loop."""
