"""Rules of `autocast` that differ on a TPU. They are chosen when a program is lowered, and do not change any number."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from kinds import assert_same_bits
from test_masked_gather import INDEX, MASKED, X
from tpu_rules import forced

import jax_lossscale as jls

PARAMS = {"in": jnp.ones((8, 16)) / 8, "bias": jnp.ones(16), "out": jnp.ones((16, 8)) / 16}


def loss_fn(params, x, index):
    hidden = jax.nn.gelu(x @ params["in"] + params["bias"][None])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(hidden @ params["out"]), index[:, None], 1))


def attention(params, x):
    return jnp.sum(jax.nn.softmax(jax.nn.relu(x @ params["in"]) @ params["out"]) @ params["in"])


def lowered(function, platforms, *args):
    return str(jax.export.export(jax.jit(function), platforms=platforms)(*args).mlir_module())


def gradient(params, x, index):
    return jax.value_and_grad(jls.autocast(loss_fn, jnp.bfloat16))(params, x, index)


def barriers_in(text):
    """Return the types of all values behind optimization barriers."""
    return re.findall(r"stablehlo.optimization_barrier .* : (\S+)", text)


def test_programs_for_tpus_contain_no_barriers_of_segments_and_no_gather_of_the_labels():
    def counts(platforms):
        text = lowered(gradient, platforms, PARAMS, X, INDEX)
        return barriers_in(text), text.count('"stablehlo.gather"')

    barriers, gathers = counts(["cuda"])
    assert len(barriers) > 1
    assert f"tensor<{len(X)}x16xbf16>" in barriers  # the rounded cotangent of the bias
    assert gathers == 1
    assert counts(["tpu"]) == ([f"tensor<{len(X)}xf32>"], 0)
    # One program for several platforms contains both, in branches for the platforms other than TPUs.
    of_all, gathers = counts(["cpu", "cuda", "tpu"])
    assert len(of_all) > len(barriers)
    assert gathers


def test_checkpoints_of_the_user_keep_their_barriers():
    def loss(params, x, index):
        return jax.checkpoint(loss_fn)(params, x, index)

    assert len(barriers_in(lowered(jax.grad(loss), ["tpu"], PARAMS, X, INDEX))) == 1


def test_maximum_and_saved_result_of_a_softmax_are_not_fused_on_a_tpu():
    def barriers(function):
        return {*barriers_in(lowered(jax.grad(jls.autocast(function, jnp.bfloat16)), ["tpu"], PARAMS, X))}

    maximum, probabilities = f"tensor<{len(X)}xf32>", f"tensor<{len(X)}x8xbf16>"
    assert barriers(attention) == {maximum, probabilities}
    # A checkpoint of the user recomputes the softmax instead of saving its result.
    assert {maximum, probabilities} & barriers(jax.checkpoint(attention)) == {maximum}


# Selected positions, and numbers whose bits a sum or a maximum could change.
SPECIAL = X.at[:, 3].set(jnp.array([-0.0, jnp.nan, jnp.inf, -jnp.inf]))


@pytest.mark.parametrize("name", [*MASKED])
@pytest.mark.parametrize("index", [INDEX, jnp.array([3, 3, 3, 3]), jnp.array([8, -9, -1, 100])])
def test_selection_by_a_mask_equals_the_gather(name, index):
    def select(y, index):
        return MASKED[name](y, index), jnp.ones((8, 8)) @ jnp.ones(8)  # `autocast` does not change other functions.

    run = jls.autocast(select)
    expected = jax.jit(run)(SPECIAL, index)
    with forced():
        text = lowered(run, ["cpu"], SPECIAL, index)
        found = jax.jit(run)(SPECIAL, index)
    assert "stablehlo.reduce" in text
    assert_same_bits(found, expected)


@pytest.mark.as_for_users
def test_gradients_do_not_depend_on_the_rules():
    def loss(params, x, index):
        return jnp.sum(jls.autocast(loss_fn, jnp.bfloat16)(params, x, index) ** 2)

    expected = jax.jit(jax.grad(loss))(PARAMS, X, INDEX)
    with forced():
        found = jax.jit(jax.grad(loss))(PARAMS, X, INDEX)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)
