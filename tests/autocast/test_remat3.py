"""`autocast` has the same effect with and without `jax_remat3`, a flag that changes how `jax.checkpoint` is traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import needs_jax
from jax.ad_checkpoint import checkpoint_name
from reading import matmul_dtypes
from small_programs import W, X, end

import jax_lossscale as jls

pytestmark = [pytest.mark.ci, pytest.mark.slow, needs_jax("0.10.2", "the flag `jax_remat3` does not exist")]


@pytest.fixture
def set_flag():
    yield functools.partial(jax.config.update, "jax_remat3")
    jax.config.update("jax_remat3", False)


def block(w, x):
    y = checkpoint_name(x @ w, "saved")
    return jnp.cumsum(jax.nn.softmax(y), axis=0) @ w


def in_custom_vjp(function):
    """Return a `jax.custom_vjp` function that calls a `jax.checkpoint` in its forward and in its backward pass."""
    checkpointed = jax.checkpoint(function)
    outer = jax.custom_vjp(checkpointed)

    def forward(w, x):
        return checkpointed(w, x), (w, x)

    outer.defvjp(forward, lambda saved, cotangent: jax.vjp(checkpointed, *saved)[1](cotangent))
    return outer


SAVING = jax.checkpoint_policies.save_only_these_names("saved")
# Functions that return a loss. They apply `jax.checkpoint` when they are called, after the flag has been set.
PROGRAMS = {
    "nothing saved": lambda w, x: end(jax.checkpoint(block)(w, x)),
    "a policy": lambda w, x: end(jax.checkpoint(block, policy=SAVING)(w, x)),
    "nested": lambda w, x: end(jax.checkpoint(lambda w, x: jax.checkpoint(block)(w, block(w, x)))(w, x)),
    "captured arrays": lambda w, x: end(jax.checkpoint(lambda x: block(w, x) + np.eye(4, 8, dtype=np.float32))(x)),
    "in scan": lambda w, x: end(jax.lax.scan(lambda x, _: (jax.checkpoint(block)(w, x), None), x, length=2)[0]),
    "in cond": lambda w, x: end(jax.lax.cond(x[0, 0] > 0, jax.checkpoint(block), lambda w, x: x @ w, w, x)),
    "in vmap": lambda w, x: end(jax.vmap(jax.checkpoint(jnp.matmul), (0, None))(jnp.stack([x, 2 * x]), w)),
    "in jit": lambda w, x: end(jax.jit(lambda w, x: jax.checkpoint(block)(w, x))(w, x)),
    "in custom_vjp": lambda w, x: end(in_custom_vjp(block)(w, x)),
    "no checkpoint": lambda w, x: end(block(w, block(w, x))),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_jax_remat3_changes_neither_dtypes_nor_gradients_nor_reports(program, set_flag):
    def found():
        gradients = jax.value_and_grad(lambda w, x: jls.autocast(program)(w, x), (0, 1))
        report = jls.diagnostics.autocast_report(program, W, X)
        dtypes = sorted(matmul_dtypes(gradients, W, X))
        compiled = jax.jit(gradients).lower(W, X).compile()
        # XLA removes the unused operations that the flag adds to jaxprs, but one more exponential remains in the scan.
        counted = () if program is PROGRAMS["in scan"] else ("exponential", "dot")
        numbers = [compiled.as_text().count(f" {name}(") for name in counted]
        return (dtypes, str(report.summary), report.bytes_after, numbers), compiled(W, X)

    counts, gradients = found()
    set_flag(True)
    with_flag, gradients_with_flag = found()
    assert set(counts[0]) == {"float16"}
    assert counts == with_flag
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), gradients, gradients_with_flag)
