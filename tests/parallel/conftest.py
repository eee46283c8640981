"""Programs for eight devices map eight times the memory: each test forgets its own."""

import jax
import pytest


@pytest.fixture(autouse=True)
def forget_programs_of_a_test():
    yield
    jax.clear_caches()
