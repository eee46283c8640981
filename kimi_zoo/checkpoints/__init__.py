"""Checkpoint formats: names and files, never math."""
