"""Fixtures for strict dtype promotion and for the working directory.

A program that strict promotion accepts has the same results with standard promotion.
"""

import jax
import pytest

import jax_lossscale as jls


@pytest.fixture(scope="module")
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def in_the_checkout(monkeypatch):
    """Change to the repository root, because reported paths are relative to the working directory."""
    monkeypatch.chdir(jls.__path__[0] + "/..")
