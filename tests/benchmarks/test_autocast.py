"""`benchmarks.autocast`: the models in every way that is compared, and what is counted of them."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.autocast.counting import bytes_kept, jaxprs_made
from benchmarks.autocast.gpu import training_step
from benchmarks.autocast.gradients import Trained
from benchmarks.autocast.models import LSTM, MambaStack, Model, ResNet, Transformer, model_of
from benchmarks.autocast.ways import AUTOCAST, BY_HAND, FLOAT32

pytest.importorskip("flax")
pytest.importorskip("jmp")

SMALL = {
    "transformer": model_of(Transformer, (2, 8, 16), blocks=1, heads=2, dropout=0.5),
    "basic ResNet": model_of(ResNet, (2, 32, 32, 3), stages=(1, 1)),
    "ResNet": model_of(ResNet, (2, 32, 32, 3), stages=(1,), bottleneck=True),
    "Mamba": model_of(MambaStack, (2, 8, 16)),
    "LSTM": model_of(LSTM, (2, 4, 8)),
}


@pytest.mark.slow  # three compilations a model
@pytest.mark.parametrize("name", SMALL)
def test_a_step_learns_the_same_in_every_way(name):
    losses = {}
    for way in (FLOAT32, BY_HAND, AUTOCAST):
        with jax.numpy_rank_promotion("allow"):  # as flax's layers need
            step, begin = training_step(SMALL[name], way)
            state, batch = begin()
            for _ in range(3):
                state = step(state, batch)
        losses[way] = float(state[-1])
        assert state[-1].dtype == jnp.float32
    assert losses == pytest.approx(dict.fromkeys(losses, losses[FLOAT32]), rel=0.05)


@pytest.mark.parametrize("name", SMALL)
def test_all_products_by_hand_are_in_half_precision_and_none_in_float32(name):
    products = {}
    for way in (FLOAT32, BY_HAND):
        with jax.numpy_rank_promotion("allow"):
            step, begin = training_step(SMALL[name], way)
            text = str(jax.make_jaxpr(step)(*jax.eval_shape(begin)))
        lines = [line for line in text.splitlines() if "dot_general[" in line or "conv_general" in line]
        products[way] = [":f16[" in line for line in lines]
    assert len(products[FLOAT32]) == len(products[BY_HAND]) > 0
    assert not any(products[FLOAT32])
    assert all(products[BY_HAND])


def test_bytes_kept_are_those_of_intermediate_values():
    def loss(params, batch):
        return (jnp.sin(params * 2) * batch).sum()

    # The derivative of sin at 100 numbers; the batch is there anyway.
    assert bytes_kept(loss, jnp.ones(100), jnp.ones(100)) == 400


def test_jaxprs_of_nested_conditionals_are_in_proportion_to_the_depth_where_each_is_traced_once():
    made = [jaxprs_made(lambda loss: loss, depth) for depth in (1, 2, 3)]
    assert made[2] - made[1] == made[1] - made[0] > 0

    def twice(loss):
        return lambda x: (jax.make_jaxpr(loss)(x), loss(x))[1]

    assert jaxprs_made(twice, 2) > made[1]


def test_the_error_of_gradients_is_that_at_the_best_scale():
    model = Model(
        lambda: jnp.full(4, 0.5),
        lambda number: jnp.full(4, 1.0 + number),
        lambda dtype: lambda params, batch: (params**3 * batch).sum(),
    )
    trained = Trained(model, steps=2, batches=2)
    assert trained.error(trained.loss) < 1e-6
    assert trained.error(lambda params, batch: 1.5 * trained.loss(params, batch)) == pytest.approx(0.5)

    @jax.custom_vjp
    def overflows(x):
        return x

    overflows.defvjp(lambda x: (x, None), lambda _, g: (jnp.where(g > 1, jnp.inf, 2 * g),))
    assert trained.error(lambda params, batch: overflows(trained.loss(params, batch))) == pytest.approx(1)
