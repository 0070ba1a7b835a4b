"""What reads numbers runs with JAX's strict rules of promotion: what they let pass, the usual ones compute alike."""

import jax
import pytest


@pytest.fixture(scope="module")
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
