"""What reads numbers runs with JAX's strict rules of promotion: what they let pass, the usual ones compute alike."""

import jax
import pytest

import jax_lossscale as jls


@pytest.fixture(scope="module")
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def in_the_checkout(monkeypatch):
    """Sources are told from where one stands."""
    monkeypatch.chdir(jls.__path__[0] + "/..")
