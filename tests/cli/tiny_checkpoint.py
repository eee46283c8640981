"""Where the checkpoint of two layers is that these tests use."""

from pathlib import Path

TINY = Path(__file__).parents[1] / "data" / "cli" / "tiny"
