"""The state of a run in plain sentences."""

import jax
import jax.numpy as jnp
import optax
import pytest
from samples import GOOD, INF, NAN, PARAMS, recorded

import jax_lossscale as jls
from jax_lossscale.diagnostics import (
    explain,
    nonfinite_report,
)

NAN_GRADS, INF_GRADS, NAN_LOSS = ([1.0, NAN], 1.0, False), ([INF, 1.0], 1.0, False), ([1.0, 1.0], NAN, False)
NO_GRADS = ([0.0, 0.0], 1.0, False)
CONDITION = ([1.0, 1.0], 1.0, True)
EXPLAINED = {
    # loss scale, recorded, steps: what is said, and what is not
    "a healthy run": ("dynamic", True, [GOOD] * 3, ["2^15 = 32768", "Of 3 steps, 3 were applied"], ["last"]),
    "a scale that is no power of two": (10.0, False, [GOOD], ["The loss scale is 10 (FixedLossScale)"], ["2^"]),
    "before the first step": ("auto", True, [], ["Of 0 steps"], ["radient"]),
    "healthy as far as the state tells": (
        "dynamic",
        False,
        [GOOD],
        ["Whether the gradients are those of float32", "`compare_gradients(loss_fn, params, batch)` does"],
        ["largest", "zero", "range_report"],
    ),
    "measured": (
        jls.AutoLossScale(64.0),
        False,
        [([4096.0, -8192.0], 1.0, False)],
        ["The largest gradient of the last step was 128.\nWhether the gradients are those of float32"],
        ["zero"],
    ),
    "measured, and all zero": (
        "auto",
        True,
        [GOOD, NO_GRADS],
        ["All gradients of the last step were exactly zero.", "`compare_gradients(loss_fn, params, batch)` tells"],
        ["largest"],
    ),
    "all zero, not measured": ("dynamic", True, [NO_GRADS], ["Whether the gradients"], ["largest", "exactly zero"]),
    "measured, and not finite": ("auto", True, [GOOD, INF_GRADS], ["an infinity"], ["largest", "exactly zero"]),
    "measured before it was not finite": ("auto", True, [NAN_GRADS, NO_GRADS], ["1 step ago", "exactly zero"], []),
    "long ago": (
        "dynamic",
        True,
        [NAN_GRADS, GOOD, GOOD],
        ["The last bad step was 2 steps ago", "['kernel']"],
        ["try"],
    ),
    "a NaN eighty steps ago, which went away": (
        "dynamic",
        True,
        [NAN_GRADS, *[GOOD] * 80],
        ["The last bad step was 80 steps ago", "The scale has been lower since, and no step was bad"],
        ["that batch"],
    ),
    "a NaN that no falling scale can have mended": (
        jls.FixedLossScale(8.0, skip_nonfinite=True),
        True,
        [NAN_GRADS, GOOD],
        ["The last bad step was 1 step ago"],
        ["lower since"],
    ),
    "an infinity eighty steps ago": (
        "dynamic",
        True,
        [INF_GRADS, *[GOOD] * 80],
        ["an infinity", "lower since"],
        ["that batch"],
    ),
    "a scale that is too low": (
        jls.AutoLossScale(2.0),
        False,
        [([1.0, -1.0], 1.0, False)],
        ["The largest gradient of the last step was 0.5. The scale is 2^9 below what that would allow in float16."],
        ["scaled_grad"],
    ),
    "gradients that were never scaled": (
        jls.AutoLossScale(2.0**60),
        False,
        [GOOD],
        ["most likely they are not scaled, and `jax.grad` stands where `jls.scaled_grad`"],
        [],
    ),
    "a fixed scale as high, on purpose": (2.0**60, False, [GOOD], ["2^60"], ["jax.grad"]),
    "long ago, not recorded": ("dynamic", False, [NAN_GRADS, GOOD], ["Of 2 steps, 1 were applied"], ["last"]),
    "an overflow": (
        "dynamic",
        True,
        [INF_GRADS],
        ["an infinity in the gradients, first in ['bias']", "nothing to do"],
        ["range_report", "compare_gradients"],
    ),
    "an overflow, not recorded": ("dynamic", False, [INF_GRADS], ["a NaN or an infinity", "nothing to do"], ["['"]),
    "a NaN at every scale": (
        jls.DynamicLossScale(2.0**30),
        True,
        [NAN_GRADS] * 17,
        [
            "The last 17 steps were skipped",
            "a NaN in the gradients, first in ['kernel']",
            "a NaN that stays is none",
            "range_report",
        ],
        ["cannot go lower"],
    ),
    "at the floor": (
        "dynamic",
        True,
        [INF_GRADS] * 15,
        ["cannot go lower", "range_report", "`min_loss_scale`"],
        ["nothing to do"],
    ),
    "at the floor, a NaN": ("dynamic", True, [NAN_GRADS] * 15, ["cannot go lower", "a NaN that stays is none"], []),
    "at the floor, not recorded": (
        "dynamic",
        False,
        [NAN_GRADS] * 15,
        ["cannot go lower", "nonfinite_report", "range_report"],
        [],
    ),
    "one step above the floor": ("dynamic", True, [INF_GRADS] * 14, ["nothing to do"], ["cannot go lower"]),
    "a loss": ("dynamic", True, [NAN_LOSS], ["its loss was not finite", "forward pass", "range_report"], ["cannot"]),
    "a loss and its gradients": (
        "dynamic",
        True,
        [([NAN, 1.0], NAN, False)],
        ["its loss was not finite", "forward pass"],
        ["nothing to do"],
    ),
    "a loss, not recorded": (
        "dynamic",
        False,
        [NAN_LOSS],
        ["its loss was not finite, or `skip_if` was true", "If it was the loss", "range_report"],
        [],
    ),
    "a condition": ("dynamic", True, [CONDITION], ["`skip_if` was true", "condition of your own"], ["forward pass"]),
    "a scale that started too high": (
        jls.DynamicLossScale(2.0**60),
        True,
        [INF_GRADS] * 17,
        ["nothing to do"],
        ["almost without a scale"],
    ),
    "at a floor that is high": (
        jls.DynamicLossScale(2.0**10, min_loss_scale=2.0**10),
        True,
        [INF_GRADS],
        ["Allow a lower one"],
        ["almost"],
    ),
    "a fixed scale that skips": (
        jls.FixedLossScale(8.0, skip_nonfinite=True),
        True,
        [INF_GRADS],
        ["Take a smaller one"],
        ["min_loss_scale"],
    ),
    "an infinity in one leaf, a NaN in the next": (
        "dynamic",
        True,
        [([INF, NAN], 1.0, False)],
        ["an infinity in the gradients, first in ['bias']"],
        ["a NaN"],
    ),
    "unscaling overflows": (
        jls.DynamicLossScale(2.0**-4, min_loss_scale=2.0**-10),
        True,
        [([1.0, 1e38], 1.0, False), GOOD],
        ["1 step ago: there was an infinity in the gradients, first in ['kernel']"],
        ["skip_if", "grads_finite"],
    ),
    "often on condition": (
        "dynamic",
        True,
        [CONDITION, *[GOOD] * 4] * 20,
        ["20% of", "your own"],
        ["increment_period"],
    ),
    "no loss scale": (None, False, [GOOD], ["not checked (NoOpLossScale)"], ["2^"]),
    "often, a NaN at the floor": (
        jls.DynamicLossScale(1.0),
        True,
        [NAN_GRADS, *[GOOD] * 4] * 20,
        ["20% of", "it was that batch, and not the scale"],
        ["increment_period"],
    ),
    "often, a loss": ("dynamic", True, [NAN_LOSS, *[GOOD] * 4] * 20, ["20% of", "forward pass"], ["increment_period"]),
    "often": (
        jls.DynamicLossScale(2.0**15, 9),
        True,
        [INF_GRADS, *[GOOD] * 9] * 10,
        ["10% of all", "increment_period"],
        [],
    ),
}


@pytest.mark.parametrize(("loss_scale", "record", "steps", "said", "unsaid"), EXPLAINED.values(), ids=EXPLAINED)
def test_explanations(loss_scale, record, steps, said, unsaid):
    state = recorded(jls.loss_scaled(optax.sgd(0.1), loss_scale, record_bad_steps=record), PARAMS, steps)
    text = explain(state, PARAMS)
    for phrase in said:
        assert phrase in text
    for phrase in unsaid:
        assert phrase not in text


# Every kind of loss scale, with and without a record, after one step of every cause.

KINDS = {
    "dynamic": "dynamic",
    "floor": jls.DynamicLossScale(1.0),
    "skipping": jls.FixedLossScale(8.0, skip_nonfinite=True),
    "fixed": 8.0,
    "none": None,
}
CAUSES = {
    "NaN": {"kernel": NAN},
    "inf": {"kernel": INF},
    "loss": {"value": NAN},
    "loss and NaN": {"value": NAN, "kernel": NAN},
    "condition": {"skip_if": True},
    "condition and NaN": {"skip_if": True, "kernel": NAN},
}
OF_GRADIENTS = ["nothing to do", "cannot go lower", "overflow goes away", "nonfinite_report"]
SENTENCES = {
    # what is said, in this order, and what is not
    "a NaN": (["skipped: there was a NaN in the gradients, first in ['kernel'].", "If that came of an overflow"], []),
    "a NaN, at the floor": (["first in ['kernel'].", "cannot go lower.\nAn overflow goes away"], ["nothing to do"]),
    "an infinity": (["there was an infinity in the gradients, first in ['kernel'].", "how the scale finds"], ["NaN"]),
    "an infinity, at the floor": (["infinity", "cannot go lower.\nThe gradients overflow"], ["nothing to do", "NaN"]),
    "an infinity, fixed": (["infinity", "cannot go lower.\nTake a smaller one"], ["nothing to do"]),
    "the loss": (
        ["skipped: its loss was not finite.\nNo loss scale", "\nIf it is,", "\nIf it is not"],
        ["the gradients", *OF_GRADIENTS],
    ),
    "the condition": (
        ["`skip_if` was true.", "of your own; the scale stays."],
        ["gradients", "loss was", *OF_GRADIENTS],
    ),
    "the condition alone": (["`skip_if` was true.", "condition of your own."], ["scale stays", "NaN", *OF_GRADIENTS]),
    "perhaps": (
        ["a NaN or an infinity in its gradients.", "only `record", "If that came of"],
        ["['kernel']"],
    ),
    "perhaps, at the floor": (
        ["a NaN or an infinity in its gradients.", "cannot go", "nonfinite_report", "it was the loss"],
        ["nothing to do"],
    ),
    "not the gradients": (
        ["its loss was not finite, or `skip_if` was true.", "If it was the loss: no loss scale"],
        OF_GRADIENTS,
    ),
    "applied": (
        ["there was a NaN in the gradients, first in ['kernel'], and the step was applied", "parameters themselves"],
        ["skipped:"],
    ),
    "applied, an infinity": (["an infinity in the gradients, first in ['kernel'], and the step was app"], ["skipped:"]),
    "perhaps applied": (["a NaN or an infinity", "was applied", "parameters themselves are not finite"], ["skipped:"]),
    "the parameters": (["parameters themselves are not finite, first in ['kernel']", "skip_nonfinite=True"], ["last"]),
    "nothing": (["the gradients are not checked"], ["last", "NaN", "parameters"]),
}
RECORDED = """
                  | dynamic       | floor                     | skipping            | fixed                | none
NaN               | a NaN         | a NaN, at the floor       | a NaN, at the floor | applied              | the parameters
inf               | an infinity   | an infinity, at the floor | an infinity, fixed  | applied, an infinity | the parameters
loss              | the loss      | the loss                  | the loss            | the loss             | nothing
loss and NaN      | the loss      | the loss                  | the loss            | the loss             | the parameters
condition         | the condition | the condition             | the condition       | the condition        | the condition alone
condition and NaN | a NaN         | a NaN, at the floor       | a NaN, at the floor | the condition        | the condition alone
"""  # noqa: E501
UNRECORDED = """
                    | dynamic           | floor                 | skipping              | fixed             | none
NaN                 | perhaps           | perhaps, at the floor | perhaps, at the floor | perhaps applied   | the parameters
inf                 | perhaps           | perhaps, at the floor | perhaps, at the floor | perhaps applied   | the parameters
loss                | not the gradients | not the gradients     | not the gradients     | not the gradients | nothing
loss and NaN        | perhaps           | perhaps, at the floor | perhaps, at the floor | not the gradients | the parameters
condition           | not the gradients | not the gradients     | not the gradients     | not the gradients | the condition alone
condition and NaN   | perhaps           | perhaps, at the floor | perhaps, at the floor | not the gradients | the condition alone
"""  # noqa: E501


def cells(table):
    (_, *kinds), *rows = ([cell.strip() for cell in line.split("|")] for line in table.strip("\n").splitlines())
    return [(kind, cause, cell) for cause, *row in rows for kind, cell in zip(kinds, row, strict=True)]


def after(tx, kernel=1.0, value=1.0, skip_if=False):
    """Parameters and state after one step."""
    grads = {"bias": jnp.float32(1.0), "kernel": jnp.float32(kernel)}
    told = {"value": jnp.float32(value), "skip_if": jnp.array(skip_if)}
    return tx.update_and_apply(grads, tx.init(PARAMS), PARAMS, **told)


@pytest.mark.parametrize(("table", "record"), [(RECORDED, True), (UNRECORDED, False)], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cause_has_its_sentence(kind, table, record):
    tx = jls.loss_scaled(optax.sgd(0.1), KINDS[kind], record_bad_steps=record)
    causes = {cause: cell for column, cause, cell in cells(table) if column == kind}
    assert causes.keys() == CAUSES.keys()
    for cause, cell in causes.items():
        params, state = after(tx, **CAUSES[cause])
        text = explain(state, params)
        said, unsaid = SENTENCES[cell]
        places = [text.find(phrase) for phrase in said]
        assert -1 not in places, (cause, text)
        assert places == sorted(places), (cause, text)
        assert not [phrase for phrase in unsaid if phrase in text], (cause, text)


def test_another_kind_put_into_the_state_of_one_that_measures_is_not_taken_for_it():
    tx = jls.loss_scaled(optax.sgd(0.1), "auto")
    state = recorded(tx, PARAMS, [GOOD])._replace(loss_scale=jls.DynamicLossScale())
    _, state = tx.update_and_apply(PARAMS, state, PARAMS)
    assert "Whether the gradients" in explain(state)
    assert not [word for word in ("largest", "zero") if word in explain(state)]


def test_of_parameters_that_are_not_finite_no_gradients_are_compared():
    tx = jls.loss_scaled(optax.sgd(0.1), "auto")
    lost = {"bias": jnp.float32(1.0), "kernel": jnp.float32(NAN)}
    assert "compare_gradients" not in explain(recorded(tx, PARAMS, [GOOD]), lost)


def test_whether_the_parameters_are_lost_is_not_known_without_them():
    for record in True, False:
        _, state = after(jls.loss_scaled(optax.sgd(0.1), 8.0, record_bad_steps=record), kernel=NAN)
        assert "\nThe parameters are lost." in explain(state)
        assert "\nThe parameters are lost." in explain(state, jax.eval_shape(lambda: PARAMS))


def test_parameters_that_are_not_finite_explain_everything():
    """The forward pass of such parameters is not to blame."""
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    _, state = after(tx, kernel=NAN, value=NAN)
    text = explain(state, {"bias": jnp.float32(1.0), "kernel": jnp.float32(NAN)})
    assert "skipped: its loss was not finite." in text
    assert "The parameters themselves are not finite, first in ['kernel']" in text
    assert "forward pass" not in text
    assert "learning rate" in text
    assert "first in the only leaf" in explain(tx.init(PARAMS), jnp.array([NAN]))


def test_a_record_of_an_earlier_step_is_not_taken_for_the_last_one():
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    _, state = after(tx, kernel=NAN)
    record = state.last_bad_step
    silent = jls.loss_scaled(optax.sgd(0.1))
    _, state = silent.update_and_apply(PARAMS, state._replace(last_bad_step=None), PARAMS, value=jnp.float32(NAN))
    text = explain(state._replace(last_bad_step=record), PARAMS)
    assert "its loss was not finite, or `skip_if` was true" in text


def after_one_bad_step(grads):
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    params = jax.tree.map(jnp.ones_like, grads)
    return tx.update_and_apply(grads, tx.init(params), params)[1]


def test_a_frozen_parameter_has_no_gradient_and_keeps_its_place():
    state = after_one_bad_step({"a": None, "b": jnp.array([NAN])})
    assert "first in ['b']" in explain(state, {"a": jnp.ones(3), "b": jnp.ones(1)})


def test_the_only_leaf_has_no_path():
    state = after_one_bad_step(jnp.array([NAN]))
    assert "first in the only leaf." in explain(state, jnp.ones(1))
    assert str(nonfinite_report(jnp.ones(1))).endswith("is in the only leaf.")


def test_a_tree_of_another_structure_is_refused():
    with pytest.raises(ValueError, match="has 1 leaves, but the gradients had more than 1"):
        explain(after_one_bad_step({"a": jnp.ones(1), "b": jnp.array([NAN])}), {"a": 1})


BAD_ARGUMENTS = {
    "a batch of runs": (lambda: explain(jax.vmap(jls.loss_scaled(optax.sgd(0.1)).init)(jnp.ones(2))), "batch of runs"),
    "no state": (lambda: explain(optax.sgd(0.1).init(jnp.ones(2))), "explain"),
}


@pytest.mark.parametrize(("call", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_traced_state_is_refused():
    state = jls.loss_scaled(optax.sgd(0.1)).init(PARAMS)
    with pytest.raises(ValueError, match="values that are traced"):
        jax.jit(lambda state: explain(state) and state)(state)


def test_without_parameters_the_leaf_is_a_number():
    state = recorded(jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True), PARAMS, [NAN_GRADS])
    assert "first in leaf 1" in explain(state)


def test_what_the_caller_said_of_finite_gradients_is_told():
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    params = jnp.ones(3)
    _, state = tx.update_and_apply(jnp.ones(3), tx.init(params), params, grads_finite=False)
    assert state.skipped_steps == 1
    assert "`grads_finite` said that the gradients were not finite, though every leaf was" in explain(state, params)


@pytest.mark.parametrize(
    ("inner", "params", "where"),
    [
        (optax.adam(0.1), PARAMS, "['kernel']"),
        (optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)), PARAMS, "['kernel']"),
        (optax.adam(0.1), {"kernel": jnp.float32(1.0)}, "['kernel']"),
        (optax.sgd(0.1), PARAMS, "leaf 1"),  # which keeps nothing
        (optax.adam(0.1), jnp.float32(1.0), "leaf 0"),  # which has no name
    ],
)
def test_without_parameters_a_moment_of_the_optimizer_names_the_leaf(inner, params, where):
    tx = jls.loss_scaled(inner, record_bad_steps=True)
    grads = jax.tree.map_with_path(lambda path, leaf: leaf * (NAN if "bias" not in str(path) else 1), params)
    _, state = tx.update(grads, tx.init(params), params)
    assert f"there was a NaN in the gradients, first in {where}." in explain(state)
