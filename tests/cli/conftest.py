"""Runs the command as its users do, as a process of its own."""

import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Variables of a user without a cache; compiled programs are shared by the tests of this folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "KIMI_ZOO_"))}
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # most of the time goes into compiling
    return inherited | quick | {"KIMI_ZOO_CACHE": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="session")
def run_command(environment):
    """Returns a function that runs `kimi-zoo` with arguments and returns the finished process."""

    def run(*arguments, **options):
        command = [sys.executable, "-m", "kimi_zoo", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, **options)

    return run
