"""A rule with a parameter pattern applies to the matmuls that use the parameter, even after data movement."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from reading import matmul_dtypes

import jax_lossscale as jls

MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
W, X = jnp.ones((8, 8)), jnp.ones((4, 8))
FLOAT32 = jls.PrecisionPolicy([jls.PrecisionRule("float32", operation="dot_general", parameter="['kept']")])
# Each entry contains a parameter, and the data movement that computes a matmul operand of the shape of W from it.
MOVED = {
    "unchanged": (W, lambda w: w),
    "transposed": (W, jnp.transpose),
    "a slice": (jnp.ones((2, 8, 8)), lambda w: w[1]),
    "a slice at a traced position": (
        jnp.ones((2, 8, 8)),
        lambda w: jax.lax.dynamic_index_in_dim(w, jnp.argmax(w[0, 0]), keepdims=False),
    ),
    "broadcast": (W[0], lambda w: jnp.broadcast_to(w, (8, 8))),
    "cast": (W.astype(jnp.bfloat16), lambda w: w.astype(jnp.float32)),
    "transposed in jit": (W, jax.jit(jnp.transpose)),
    "slice in a scan": (jnp.ones((2, 8, 8)), None),
    "sharded": (W, lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(MESH, jax.P()))),
    "optimization barrier": (W, lambda w: jax.lax.optimization_barrier((jnp.ones(3), w))[1]),
    "from a branch": (W, lambda w: jax.lax.cond(w[0, 0] > 0, jnp.transpose, jnp.flip, w)),
    "selected by a mask": (W, lambda w: jnp.where(jnp.eye(8, dtype=bool), w, 0.0)),
}


@pytest.mark.parametrize("name", MOVED)
def test_parameter_rule_applies_after_data_movement(name):
    parameter, moved = MOVED[name]

    def product(params, x):
        if moved is None:
            x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, params["kept"])
        else:
            x = x @ moved(params["kept"])
        return x @ params["other"]

    def loss(params, x):
        return jnp.sum(product(params, x))

    params = {"kept": parameter, "other": W}
    assert matmul_dtypes(jls.autocast(loss, policy=FLOAT32), params, X) == ["float32", "float16"]
    of_gradient = matmul_dtypes(jax.grad(jls.autocast(loss, policy=FLOAT32)), params, X)
    assert of_gradient.count("float32") > 1  # The rule also applies to the backward matmul.
    assert set(matmul_dtypes(jax.grad(jls.autocast(loss)), params, X)) == {"float16"}
    if name not in ("slice in a scan", "sharded"):
        over_rows = jax.shard_map(product, mesh=MESH, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data"))
        assert matmul_dtypes(jls.autocast(over_rows, policy=FLOAT32), params, X) == ["float32", "float16"]


# Functions that call a function of an array.
CALLS = {
    "while": lambda f, x: jax.lax.while_loop(
        lambda state: state[0] < 3, lambda state: (state[0] + 1, f(state[1])), (0, x)
    ),
    "jit": lambda f, x: jax.jit(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("parameter", "other"), [("['kept']", "float16"), ("*kept*", "float16"), ("*", "float32")])
def test_parameter_rule_applies_inside_calls(call, parameter, other):
    policy = jls.PrecisionPolicy([jls.PrecisionRule("float32", operation="dot_general", parameter=parameter)])
    half = jls.autocast(lambda p, x: call(lambda x: x @ p["kept"] @ p["other"], x), policy=policy)
    assert matmul_dtypes(half, {"kept": W, "other": W}, X) == ["float32", other]


def test_parameter_rule_can_be_combined_with_other_rules():
    policy = jls.PrecisionPolicy([*FLOAT32.rules, jls.PrecisionRule("half", operation="dot_general")])
    params = {"kept": W, "other": W}
    half = jls.autocast(lambda params, x: x @ params["kept"] @ params["other"], policy=policy)
    assert matmul_dtypes(half, params, X) == ["float32", "float16"]
