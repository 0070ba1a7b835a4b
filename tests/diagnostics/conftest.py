"""What reads numbers runs with JAX's usual rules of promotion and with the strict ones."""

import jax
import pytest


@pytest.fixture(params=["standard", "strict"], scope="module")
def promotion(request):
    with jax.numpy_dtype_promotion(request.param):
        yield request.param
