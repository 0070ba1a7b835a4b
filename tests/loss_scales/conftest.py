"""Fixture that runs each test eagerly and under `jax.jit`."""

import jax
import pytest

UPDATES = {"eager": lambda loss_scale, grads: loss_scale.update(grads), "jit": jax.jit(lambda s, g: s.update(g))}


@pytest.fixture(params=UPDATES.values(), ids=UPDATES)
def update(request):
    return request.param
