"""Small models trained from scratch learn to remember, and the same models with their recurrent state taken away don't.

Chance is one in eight: values are independent of everything that an ablated model sees (see the example's docstring).
"""

import json
import os
import pathlib
import subprocess
import sys

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "learn_history.py"
CHANCE = 1 / 8  # of 1024 answers each: a standard deviation of 0.01


def test_only_a_recurrent_state_learns_to_remember(tmp_path):
    variants = ("all KDA", "all KDA, KDA zeroed", "all KDA, state cut every 64 tokens", "hybrid", "hybrid, KDA zeroed")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    command = [sys.executable, EXAMPLE, "--steps", "160", "--json", tmp_path / "table.json", "--variants", *variants]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    table = json.loads((tmp_path / "table.json").read_text())
    assert list(table) == list(variants)
    for name, shares in table.items():
        for task, share in shares.items():
            if name in ("all KDA", "hybrid"):
                assert share > 0.8, (name, task, share)
            else:
                assert abs(share - CHANCE) < 0.05, (name, task, share)
