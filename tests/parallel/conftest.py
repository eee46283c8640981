"""Programs for eight devices map eight times the memory: each test forgets its own."""

import jax
import pytest
from mesh_cases import loss_and_gradients, model_of, packed_batch


@pytest.fixture(autouse=True)
def forget_programs_of_a_test():
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def expected(model):
    return loss_and_gradients(model, packed_batch())
