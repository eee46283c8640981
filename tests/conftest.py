"""Shared test set-up: run-time shape checks, several CPU devices, strict promotion, seeded randomness."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.random as jr
import jaxtyping
import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_disable_most_optimizations", True)  # nearly all the time goes into compiling: leave LLVM's out

# The same examples at every run, so that a failure is always the change's; HYPOTHESIS_PROFILE=default searches anew.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

install_import_hook("kimi_zoo", "beartype.beartype")  # stays for the whole run


@pytest.fixture
def unchecked(monkeypatch):
    """Switches the run-time type checks off, which users do not have: their wrong arguments reach the function."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Compiled programs map memory in many small pieces, of which a process may have only so many."""
    yield
    jax.clear_caches()


@pytest.fixture
def getkey():
    """Returns a function giving a fresh PRNG key at each call; the sequence is the same in every run."""
    key = jr.PRNGKey(5678)

    def next_key():
        nonlocal key
        key, sub = jr.split(key)
        return sub

    return next_key
