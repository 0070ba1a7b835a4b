"""Comparison of `limits_of` with casts of neighboring numbers from a wider dtype."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_lossscale._limits import limits_of


@pytest.mark.parametrize(
    ("dtype", "wider"),
    [(jnp.float16, np.float32), (jnp.bfloat16, np.float32), (jnp.float32, np.float64)],
    ids=["float16", "bfloat16", "float32"],
)
def test_limits_separate_numbers_that_round_differently(dtype, wider):
    def rounded(number):
        with np.errstate(over="ignore"):
            return np.asarray(number, wider).astype(dtype).astype(wider)

    def below(number):
        return np.nextafter(wider(number), wider(0))

    def above(number):
        return np.nextafter(wider(number), wider(np.inf))

    limits = limits_of(dtype)
    assert rounded(limits.largest) == limits.largest
    assert rounded(below(limits.overflow)) == limits.largest
    assert np.isinf(rounded(limits.overflow))
    assert rounded(limits.zero) == 0 < rounded(above(limits.zero))
    assert rounded(below(limits.subnormal)) < jnp.finfo(dtype).smallest_normal
    assert rounded(limits.subnormal) == jnp.finfo(dtype).smallest_normal
