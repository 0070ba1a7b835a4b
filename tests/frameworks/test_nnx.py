"""Both nnx optimizers, and restoring a module after a skipped step."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

flax = pytest.importorskip("flax")

from flax import nnx  # noqa: E402
from kinds import assert_same_bits, slow_except  # noqa: E402

import jax_lossscale as jls  # noqa: E402
from jax_lossscale.interop.flax import Optimizer  # noqa: E402

pytestmark = pytest.mark.ci


def pure(node, *filters):
    return nnx.to_pure_dict(nnx.state(node, *filters))


def copied_leaves(tree):
    return jax.tree.map(lambda leaf: leaf, tree)


class Line(nnx.Module):
    def __init__(self, size=2):
        self.slope = nnx.Param(jnp.ones(size))
        self.seen = nnx.BatchStat(jnp.zeros(size))

    def __call__(self, x):
        self.seen[...] = self.seen[...] + x.astype(jnp.float32)
        return x * self.slope[...].astype(x.dtype)


def loss_fn(model, x):
    return jnp.mean(jnp.square(model(x).astype(jnp.float32)))


LOSS_SCALE = jls.DynamicLossScale(2.0**8, 2)
XS = jnp.asarray(np.random.default_rng(0).normal(size=(8, 2)), jnp.float16).at[3, 0].set(jnp.inf).at[5, 1].set(1e4)


def step(model, opt, x):
    loss, grads = nnx.value_and_grad(lambda model: jls.scale_gradient(loss_fn(model, x), opt.opt_state))(model)
    opt.update(model, grads, value=loss)
    return loss


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_both_nnx_optimizers_agree_with_optax(compiled):
    tx = jls.loss_scaled(optax.adam(0.1), LOSS_SCALE)
    runs = {}
    for kind in Optimizer, nnx.Optimizer:
        model = Line()
        opt = kind(model, tx, wrt=nnx.Param)
        one_step = nnx.jit(step) if compiled else step
        losses = [float(one_step(model, opt, x)) for x in XS]
        runs[kind] = losses, model.slope[...], pure(opt)
    params, state, losses = jnp.ones(2), tx.init(jnp.ones(2)), []
    for x in XS:
        loss, grads = jls.value_and_scaled_grad(
            lambda slope, x: jnp.mean(jnp.square((x * slope.astype(x.dtype)).astype(jnp.float32))), state
        )(params, x)
        params, state = tx.update_and_apply(grads, state, params, value=loss)
        losses.append(float(loss))
    assert state.skipped_steps == 2
    for found_losses, slope, opt in runs.values():
        np.testing.assert_allclose(found_losses, losses, rtol=1e-3)
        np.testing.assert_allclose(slope, params, rtol=1e-5)
        assert (opt["step"], opt["opt_state"]["skipped_steps"]) == (8, 2)
        assert opt["opt_state"]["loss_scale"]["current_loss_scale"] == state.loss_scale()


class Deep(nnx.Module):
    """A module whose forward pass changes statistics and random streams and adds a variable."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense, self.norm = nnx.Linear(2, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dropout, self.adapter = nnx.Dropout(0.5, rngs=rngs), nnx.LoRA(4, 1, 1, rngs=rngs)

    def __call__(self, x):
        hidden = self.dropout(self.norm(self.dense(x)))
        self.hidden = nnx.Intermediate(hidden)
        return self.adapter(hidden)


def deep_loss(model, x, power=2):
    output = model(x)
    return jnp.mean(output**power) + jnp.mean(output - 1), {"output": output}


@pytest.mark.slow
@pytest.mark.parametrize("wrt", [nnx.Param, nnx.LoRAParam], ids=["all", "adapter"])
def test_optimizer_gradient_equals_that_of_flax_times_the_scale(wrt):
    model, expected_model, x = Deep(), Deep(), jnp.ones((3, 2))
    opt = Optimizer(model, jls.loss_scaled(optax.adam(0.1), 2.0**10), wrt=wrt)
    flaxs_own = nnx.value_and_grad(deep_loss, argnums=nnx.DiffState(0, wrt), has_aux=True)
    (expected, expected_aux), expected_grads = flaxs_own(expected_model, x, power=4)
    (loss, aux), grads = opt.value_and_scaled_grad(deep_loss, has_aux=True)(model, x, power=4)
    assert_same_bits((loss, aux), (expected, expected_aux))
    assert_same_bits(jax.tree.map(lambda leaf: leaf / 2.0**10, pure(grads)), pure(expected_grads))
    assert_same_bits(pure(model), pure(expected_model))
    opt.update(model, grads, value=loss)
    assert opt.opt_state.applied_steps[...] == 1


# The entries are the input, arguments of `update`, whether the step is skipped, and whether it is compiled.
SKIPPED = {
    "applied step": (XS[0], {}, False, True),
    "nonfinite batch": (XS[3], {}, True, True),
    "nonfinite batch, eager": (XS[3], {}, True, False),
    "skip_if": (XS[0], {"skip_if": jnp.array(True)}, True, True),
    "grads_finite": (XS[0], {"grads_finite": jnp.array(False)}, True, True),
}


@pytest.mark.parametrize(("x", "kwargs", "is_skipped", "compiled"), SKIPPED.values(), ids=SKIPPED)
def test_restore_from_undoes_the_forward_pass_of_a_skipped_step(x, kwargs, is_skipped, compiled):
    def one_step(model, opt, x, kwargs):
        before = nnx.clone(model)
        (loss, _), grads = opt.value_and_scaled_grad(jls.autocast(deep_loss), has_aux=True)(model, x)
        opt.update(model, grads, value=loss, restore_from=before, **kwargs)

    model = Deep()
    opt = Optimizer(model, jls.loss_scaled(optax.adam(0.1), LOSS_SCALE), wrt=nnx.Param)
    run = nnx.jit(one_step) if compiled else one_step
    run(model, opt, jnp.stack([XS[1], XS[2]]).astype(jnp.float32), {})  # After this step, no statistic is zero.
    start, start_of_inner = copied_leaves(pure(model)), copied_leaves(pure(opt)["opt_state"]["inner_state"])
    changed = copied_leaves(nnx.clone(model))
    deep_loss(changed, jnp.stack([x, x]).astype(jnp.float32))
    run(model, opt, jnp.stack([x, x]).astype(jnp.float32), kwargs)
    assert opt.opt_state.skipped_steps[...] == is_skipped
    if is_skipped:
        assert_same_bits(pure(model), start)
        assert_same_bits(pure(opt)["opt_state"]["inner_state"], start_of_inner)
    else:
        assert model.dropout.rngs.count[...] == start["dropout"]["rngs"]["count"] + 1
        np.testing.assert_allclose(model.norm.mean[...], changed.norm.mean[...], rtol=1e-2)
        assert (model.norm.mean[...] != start["norm"]["mean"]).all()


def test_added_variables_stay_and_nothing_is_undone_without_restore_from():
    for is_given in True, False:
        model = Deep()
        opt = Optimizer(model, jls.loss_scaled(optax.sgd(0.1)), wrt=nnx.Param)
        before = nnx.clone(model)
        _, grads = opt.value_and_scaled_grad(deep_loss, has_aux=True)(model, jnp.ones((3, 2)))
        opt.update(model, grads, skip_if=jnp.array(True), **({"restore_from": before} if is_given else {}))
        assert (int(model.dropout.rngs.count[...]), model.hidden[...].shape) == (0 if is_given else 1, (3, 4))


def with_its_statistics(model):
    """Return a copy with new parameters that shares its statistics with the model."""
    copied = nnx.clone(model)
    copied.seen = model.seen
    return copied


INVALID_COPIES = {
    "itself": (lambda model: model, "got the model itself"),
    "its state": (nnx.state, "got <class .*State"),
    "a copy with the same variables": (copy.copy, "got .* a copy that shares its variables"),
    "a copy with the same statistics": (with_its_statistics, "got .* a copy that shares its variables"),
    "a flag": (lambda _: True, "got <class 'bool'>"),
}


@pytest.mark.parametrize(("wrong", "words"), INVALID_COPIES.values(), ids=INVALID_COPIES)
def test_invalid_restore_from_raises_before_any_change(wrong, words):
    model = Line()
    opt = Optimizer(model, jls.loss_scaled(optax.sgd(0.1)), wrt=nnx.Param)
    with pytest.raises(ValueError, match=rf"update\(restore_from=\.\.\.\).*nnx\.clone\(model\).*{words}"):
        opt.update(model, nnx.grad(loss_fn)(model, XS[0]), restore_from=wrong(model))
    assert opt.step[...] == 0
    with pytest.raises(ValueError, match=r"Optimizer\.value_and_scaled_grad\(fun=\.\.\.\)"):
        opt.value_and_scaled_grad(3.0)


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.LoRAParam], ids=["all", "adapter"])
def test_explain_distinguishes_parameters_from_other_variables(wrt):
    model = Deep()
    opt = Optimizer(model, jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True), wrt=wrt)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, wrt))
    opt.update(model, grads | {"adapter": jax.tree.map(lambda leaf: leaf * jnp.nan, grads["adapter"])})
    report = jls.diagnostics.explain(opt, model)
    assert "there was a NaN in the gradients, first in ['adapter']['lora_a'].value." in str(report)
    assert "first in ['adapter']['lora_a']" in str(jls.diagnostics.explain(opt.opt_state, nnx.state(model, wrt)))
    assert jls.metrics(opt)["loss_scale"] == jls.get_loss_scale(opt)() == jls.metrics(opt.opt_state)["loss_scale"]
    assert "['norm']" not in str(report)
    model.norm.mean[...] *= jnp.inf
    report = jls.diagnostics.explain(opt, model)
    assert report.cause == "nan"
    assert report.sentences[-2] == "['norm']['mean'].value, which is not trained, is not finite. Reset it."
    model.adapter.lora_a[...] *= jnp.nan
    report = jls.diagnostics.explain(opt, model)
    assert report.cause == "params"
    assert "Some parameters in ['adapter']['lora_a'].value are not finite" in str(report)
    assert "not trained" not in str(report)
    # An optax state contains no filter, so all `nnx.Param` variables count as parameters.
    state = jls.loss_scaled(optax.sgd(0.1)).init(nnx.state(model, nnx.Param))
    assert jls.diagnostics.explain(state, model).cause == "params"


INSTEAD_OF_A_STATE = {
    "a state": (lambda model, opt: nnx.state(opt), "a `State`. Pass the nnx optimizer, created with `loss_scaled`,"),
    "a module": (lambda model, opt: model, "a `Deep`. Pass the nnx optimizer"),
}


@pytest.mark.parametrize(("wrong", "got"), INSTEAD_OF_A_STATE.values(), ids=INSTEAD_OF_A_STATE)
def test_error_names_the_nnx_object_passed_instead_of_an_optimizer_state(wrong, got):
    model = Deep()
    opt = Optimizer(model, jls.loss_scaled(optax.adam(0.1)), wrt=nnx.Param)
    with pytest.raises(ValueError, match=rf"explain\(opt_state=\.\.\.\)` must be or contain .*; got {got}"):
        jls.diagnostics.explain(wrong(model, opt))


@pytest.mark.parametrize("function", [jls.value_and_scaled_grad, jls.scaled_grad])
def test_scaled_gradients_reject_nnx_modules_that_change(function):
    for argnums in 0, (0,):
        with pytest.raises(ValueError, match=rf"^`{function.__name__}` got .*flax\.Optimizer\.value_and_scaled_grad"):
            function(loss_fn, 8.0, argnums)(Line(), XS[0])
    function(lambda w, model: jnp.sum(w * model.seen[...]), 8.0)(jnp.ones(2), Line())  # not differentiated
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    model.offset = nnx.Variable(jnp.ones(1))  # a constant
    grads = jax.tree.leaves(function(lambda model, x: jnp.sum(model(x)), 8.0)(model, jnp.ones((3, 2))))
    grads = [leaf for leaf in grads if leaf.shape][:2]
    assert_same_bits(grads, [jnp.full(1, 24.0), jnp.full((2, 1), 24.0)])


def test_warning_points_to_the_line_that_calls_flax():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    opt = Optimizer(model, jls.loss_scaled(optax.sgd(0.1), 2.0**20), wrt=nnx.Param)
    with pytest.warns(UserWarning, match="The loss is float16") as caught:
        opt.value_and_scaled_grad(lambda model: jnp.sum(model(jnp.ones(2))).astype(jnp.float16))(model)
    assert [warning.filename for warning in caught] == [__file__]


def test_nnx_optimizer_rejects_an_optimizer_without_a_loss_scale():
    with pytest.raises(ValueError, match=r"jls\.loss_scaled\(tx, None\)"):
        Optimizer(Line(), optax.sgd(0.1), wrt=nnx.Param)


# --- Gradient accumulation with nnx modules ---


class Regularized(nnx.Module):
    """A module with batch norm and dropout, whose variables change in each micro-batch."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.readout = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.readout(self.dropout(nnx.relu(self.norm(self.dense(x)))))


X, TARGET = jnp.reshape(jnp.sin(jnp.arange(48.0)), (12, 4)), jnp.cos(jnp.arange(12.0))[:, None]


def squared_error(model, x, target=TARGET):
    return jnp.mean(jnp.square(model(x) - target))


def loss_and_mean(model, x, target):
    return squared_error(model, x, target), jnp.mean(x)


@pytest.mark.parametrize("compiled", slow_except([True], [True, False]))
@pytest.mark.parametrize("transform", [lambda fun: fun, jls.autocast], ids=["float32", "autocast"])
def test_accumulation_equals_a_loop_over_microbatches(compiled, transform):
    fun, models = transform(loss_and_mean), [Regularized(nnx.Rngs(0)) for _ in range(2)]
    opts = [Optimizer(model, jls.loss_scaled(optax.sgd(0.1), 2.0**10), wrt=nnx.Param) for model in models]
    before = pure(models[0], nnx.BatchStat)

    def accumulate(opt, model):
        return opt.accumulate_gradients(fun, 3, batch_argnums=(1, -1), has_aux=True)(model, X, TARGET)

    mean = (nnx.jit(accumulate) if compiled else accumulate)(opts[0], models[0])

    values, grads, auxs = [], [], []
    gradient = opts[1].value_and_scaled_grad(fun, has_aux=True)
    for start in range(3):
        (value, aux), scaled_grads = gradient(models[1], X[start::3], TARGET[start::3])
        values.append(value)
        auxs.append(aux)
        grads.append(nnx.to_pure_dict(scaled_grads))
    expected = jax.tree.map(lambda *leaves: sum(leaves) / 3, *grads)
    # The gradient of the bias before the batch norm is zero except for rounding errors, which are also scaled.
    tolerance = {"rtol": 1e-5, "atol": 1e-3} if transform is not jls.autocast else {"rtol": 2e-3, "atol": 2e-2}
    np.testing.assert_allclose(mean.value, np.mean(values), rtol=1e-3)
    np.testing.assert_allclose(mean.aux, auxs, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), nnx.to_pure_dict(mean.grads), expected)
    ours, theirs = (pure(model, nnx.Not(nnx.RngKey)) for model in models)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), ours, theirs)
    assert int(ours["dropout"]["rngs"]["count"]) == 3
    assert not jnp.array_equal(ours["norm"]["mean"], before["norm"]["mean"])
    opts[0].update(models[0], mean.grads, value=mean.value)
    assert opts[0].opt_state.applied_steps[...] == 1


def test_accumulation_changes_other_modules_and_passes_other_arguments():
    model, counter = Line(), Line()

    def fun(model, x, factor, counter):
        counter(jnp.ones(2))
        return factor * jnp.sum(x @ model.slope[...])

    opt = Optimizer(model, jls.loss_scaled(optax.sgd(0.1), 8.0), wrt=nnx.Param)
    mean = opt.accumulate_gradients(fun, 2)(model, jnp.ones((4, 2)), 3.0, counter=counter)
    assert mean.value == 12
    np.testing.assert_array_equal(mean.grads["slope"][...], [48, 48])
    np.testing.assert_array_equal(counter.seen[...], [2, 2])


class Growing(Line):
    def __call__(self, x):
        self.added = nnx.BatchStat(jnp.ones(2))
        return x @ self.slope[...][:, None]


def test_accumulation_rejects_invalid_arguments():
    model = Line(4)
    opt = Optimizer(model, jls.loss_scaled(optax.sgd(0.1), 8.0), wrt=nnx.Param)
    for call, message in (
        (lambda: opt.accumulate_gradients(3, 2), r"Optimizer.accumulate_gradients\(fun=...\)` must be a function"),
        (lambda: opt.accumulate_gradients(squared_error, 0), r"num_microbatches=...\)` must be at least 1"),
        (lambda: opt.accumulate_gradients(squared_error, 5)(model, X), "got a batch of 12 examples"),
        (lambda: opt.accumulate_gradients(squared_error, 2, batch_argnums=0)(model, X), "must not differentiate"),
        (
            lambda: opt.accumulate_gradients(lambda m, x: jnp.sum(m(x)), 2)(Growing(4), X),
            "added variables to the model",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda model: jls.accumulate_gradients(squared_error, 8.0, 2)(model.dense, X),  # its variables do not change
        lambda model: jls.accumulate_gradients(lambda w, x, model: w * jnp.sum(model(x)), 8.0, 2)(1.0, X, model),
        lambda model: jls.accumulate_gradients(lambda w, x, *, m: w * jnp.sum(m(x)), 8.0, 2)(1.0, X, m=[model]),
        lambda model: jls.accumulate_gradients(model.__call__, 8.0, 2, batch_argnums=0, argnums=1)(X, 1.0),
        lambda model: jls.accumulate_gradients(model, 8.0, 2, batch_argnums=0, argnums=1)(X, 1.0),
        lambda model: jls.accumulate_gradients(partial(squared_error, model), 8.0, 2, batch_argnums=0, argnums=1)(
            X, 1.0
        ),
    ],
    ids=["differentiated", "positional", "keyword", "method", "function", "partial"],
)
def test_accumulate_gradients_rejects_nnx_modules(call):
    with pytest.raises(ValueError, match=r"got an nnx module.*interop\.flax\.Optimizer\.accumulate_gradients"):
        call(Regularized(nnx.Rngs(0)))


def test_accumulate_gradients_accepts_the_state_of_a_module():
    definition, state = nnx.split(nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
    mean = jls.accumulate_gradients(lambda state, x: jnp.sum(nnx.merge(definition, state)(x)), 8.0, 2)(state, X)
    np.testing.assert_allclose(mean.grads["bias"][...], 8 * 6)
