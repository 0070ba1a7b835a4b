"""The report on updates that are too small to change their parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_lossscale.diagnostics import lost_updates

pytestmark = [pytest.mark.as_for_users, pytest.mark.usefixtures("strict_promotion")]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: dtype.__name__)
def test_counts_equal_those_of_numpy(dtype):
    rng = np.random.default_rng(0)
    params = rng.normal(size=(40, 50)).astype(dtype)
    updates = (rng.normal(size=(40, 50)) * 2.0 ** rng.uniform(-30, 2, (40, 50))).astype(np.float32)
    updates[rng.random((40, 50)) < 0.2] = 0
    rounded = (params.astype(np.float32) + updates).astype(dtype)
    (leaf,) = report = lost_updates(params, jnp.asarray(updates))
    assert (leaf.path, leaf.dtype) == ("", np.dtype(dtype).name)
    assert leaf.nonzero == report.nonzero == np.count_nonzero(updates)
    assert leaf.lost == report.lost == np.count_nonzero((rounded == params) & (updates != 0))
    assert 0 < report.fraction == leaf.lost / leaf.nonzero < 1


def test_leaves_are_sorted_and_counted_together():
    params = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones((2, 3), jnp.float16), "c": jnp.zeros(2), "n": jnp.arange(3)}
    updates = {"a": jnp.full(4, 2.0**-9), "b": jnp.full((2, 3), 2.0**-9), "c": jnp.ones(2), "n": jnp.zeros(3)}
    report = lost_updates(params, {**updates, "b": updates["b"].at[0, 0].set(-(2.0**-13))})
    counts = {leaf.path: (leaf.nonzero, leaf.lost) for leaf in report}
    assert list(counts.items()) == [("['a']", (4, 4)), ("['b']", (6, 1)), ("['c']", (2, 0))]
    assert (report.nonzero, report.lost, report.fraction) == (12, 5, 5 / 12)
    assert str(report).splitlines()[0] == "42% of the nonzero updates do not change their parameter."
    assert [line.split()[0] for line in str(report).splitlines()[1:]] == ["leaf", "['a']", "['b']"]


def test_special_numbers():
    nan, inf = float("nan"), float("inf")
    params = jnp.asarray([0.0, -0.0, 0.0, 1.0, inf, inf, nan], jnp.float16)
    updates = jnp.asarray([1e-9, 1e-9, 1e-7, nan, 1.0, -inf, 1.0], jnp.float32)
    # An update of a zero that is rounded to zero is lost, and so is a finite update of an infinity.
    report = lost_updates(params, updates)
    assert (report.nonzero, report.lost) == (7, 4)


def test_the_dtype_is_that_of_the_comparison():
    (leaf,) = lost_updates(np.ones(2, np.float64), np.full(2, 1e-9))
    assert (leaf.dtype, leaf.lost) == ("float32", 2)


def test_leaves_without_updates_are_ignored():
    params = {"frozen": jnp.ones(2), "none": None, "key": jax.random.key(0), "name": "relu", "empty": jnp.zeros(0)}
    updates = {"frozen": None, "none": None, "key": None, "name": None, "empty": jnp.zeros(0)}
    report = lost_updates(params, updates)
    assert [leaf.path for leaf in report] == ["['empty']"]
    assert str(report) == "All updates are zero."
    assert report.fraction == 0


def test_bad_input():
    params = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"`lost_updates\(updates=...\)` must be a pytree of arrays"):
        lost_updates(params, "updates")
    with pytest.raises(ValueError, match=r"`lost_updates\(params=..., updates=...\)` must be pytrees with the same"):
        lost_updates(params, {"v": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"must have the same shapes, got \(2,\) and \(3,\) at \"\['w'\]\""):
        lost_updates(params, {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"`lost_updates\(params=...\)` must be concrete arrays, got traced or"):
        jax.jit(lambda params: lost_updates(params, {"w": jnp.ones(2)}).fraction)(params)
    with pytest.raises(ValueError, match=r"`lost_updates\(updates=...\)` must be concrete arrays, got traced or"):
        lost_updates(params, jax.eval_shape(lambda: params))
