"""The program on the page `docs/guide/step.md`: its loss in float16 and float32."""

import jax.numpy as jnp
import numpy as np
import pytest
from pages import copied

import jax_lossscale as jls

pytestmark = [pytest.mark.ci, pytest.mark.slow]


def test_float16_reaches_the_loss_of_float32():
    page = copied("../guide/step")
    ends = {dtype: page.train(dtype) for dtype in (jnp.float32, jnp.float16)}
    (full, full_state), (half, half_state) = ends[jnp.float32], ends[jnp.float16]
    np.testing.assert_allclose(half, full, rtol=0.15)
    assert full < 0.2  # The variance of the target, a sine, is 0.5.
    assert isinstance(full_state.loss_scale, jls.NoOpLossScale)
    assert isinstance(half_state.loss_scale, jls.AutoLossScale)
    assert half_state.applied_steps >= 190
