"""`benchmarks.autocast`: the models, what is counted of them, and which marks follow."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.autocast import tables
from benchmarks.autocast.counting import bytes_kept, jaxprs_made
from benchmarks.autocast.gpu import training_step
from benchmarks.autocast.gradients import Trained
from benchmarks.autocast.models import LSTM, MambaStack, Model, ResNet, Transformer, model_of
from benchmarks.autocast.ways import AUTOCAST, BY_HAND, FLOAT32, WAYS
from benchmarks.gpu_program import Program
from benchmarks.isolation import Progress
from benchmarks.kernels import BANDWIDTH, Kernel

pytest.importorskip("flax")
pytest.importorskip("jmp")

SMALL = {
    "transformer": model_of(Transformer, (2, 8, 16), blocks=1, heads=2, dropout=0.5),
    "basic ResNet": model_of(ResNet, (2, 32, 32, 3), stages=(1, 1)),
    "ResNet": model_of(ResNet, (2, 32, 32, 3), stages=(1,), bottleneck=True),
    "Mamba": model_of(MambaStack, (2, 8, 16)),
    "LSTM": model_of(LSTM, (2, 4, 8)),
}


@pytest.fixture(autouse=True)
def ranks_may_differ():
    with jax.numpy_rank_promotion("allow"):  # as flax's layers need
        yield


@pytest.mark.parametrize("name", SMALL)
def test_a_step_learns_the_same_in_every_way(name):
    losses = {}
    for way in (FLOAT32, BY_HAND, AUTOCAST):
        step, begin = training_step(SMALL[name], way)
        state, batch = begin()
        for _ in range(3):
            state = step(state, batch)
        losses[way] = float(state[-1])
        assert state[-1].dtype == jnp.float32
    assert losses == pytest.approx(dict.fromkeys(losses, losses[FLOAT32]), rel=0.05)


@pytest.mark.parametrize("name", SMALL)
def test_products_by_hand_are_in_half_precision(name):
    model = SMALL[name]
    texts = {way: str(jax.make_jaxpr(WAYS[way](model))(*model.arguments())) for way in (FLOAT32, BY_HAND)}
    lines = {
        way: [line for line in text.splitlines() if "dot_general[" in line or "conv_general" in line]
        for way, text in texts.items()
    }
    assert len(lines[FLOAT32]) == len(lines[BY_HAND]) > 0
    assert not any("f16" in line for line in lines[FLOAT32])
    assert all("f16" in line for line in lines[BY_HAND])


def test_bytes_kept_are_those_of_intermediate_values():
    def loss(params, batch):
        return (jnp.sin(params * 2) * batch).sum()

    # The derivative of sin at 100 numbers; the batch is there anyway.
    assert bytes_kept(loss, jnp.ones(100), jnp.ones(100)) == 400


def test_jaxprs_of_nested_conditionals_are_in_proportion_to_the_depth_where_each_is_traced_once():
    made = [jaxprs_made(lambda loss: loss, depth) for depth in (1, 2, 3)]
    assert made[0] > 0
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
    assert float(trained.batches[1][0]) == 4.0
    assert trained.error(trained.loss) < 1e-6
    assert trained.error(lambda params, batch: 1.5 * trained.loss(params, batch)) == pytest.approx(0.5)

    @jax.custom_vjp
    def overflows(x):
        return x

    overflows.defvjp(lambda x: (x, None), lambda _, g: (jnp.where(g > 1, jnp.inf, 2 * g),))
    assert trained.error(lambda params, batch: overflows(trained.loss(params, batch))) == pytest.approx(1)


# --- Tables ---


def launched(*microseconds, temporaries=100):
    kernels = [Kernel("", each * 1e-6 * BANDWIDTH, {"f16": 1.0}) for each in microseconds]
    return Program(kernels, 0, 0, temporaries)


PROGRAMS = {
    FLOAT32: launched(30, 10),
    BY_HAND: launched(20, temporaries=80),
    AUTOCAST: launched(11, 11, temporaries=60),
}


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(tables.cuda, "missing", lambda: "")
    monkeypatch.setattr(tables, "call_apart", lambda function, model, way, timeout: PROGRAMS[way])


def test_the_marks_of_a_step(compiled):
    steps = tables._steps(["LSTM"], False, Progress(lambda *_: None))
    assert [mark.value for mark in steps.marks] == pytest.approx([1.1, 0.75, 0.55])
    assert [mark.goal for mark in steps.marks] == [0.73, 0.79, 1.0]
    assert steps.rows[2][:4] == ("LSTM", AUTOCAST, pytest.approx(0.022), pytest.approx(1.1))
    assert steps.rows[2][-1] == "2 in f16"


def test_what_is_not_compiled_is_not_measured(compiled, monkeypatch):
    monkeypatch.setattr(tables.cuda, "missing", lambda: "needs a package")
    steps = tables._steps(["LSTM", "Mamba"], False, Progress(lambda *_: None))
    assert [(mark.value, mark.note) for mark in steps.marks] == 6 * [(None, "needs a package")]
    monkeypatch.setattr(tables.cuda, "missing", lambda: "")
    monkeypatch.setattr(tables, "call_apart", lambda *_, timeout: None)
    steps = tables._steps(["LSTM"], False, Progress(lambda *_: None))
    assert {(mark.value, mark.note) for mark in steps.marks} == {(None, "XLA did not compile it")}
