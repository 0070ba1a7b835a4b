"""`MixedPrecision` in trainers that compute the gradients and apply the optimizer themselves."""

import contextlib
import copy
import dataclasses
import functools
import pickle

import any_jax
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

pytestmark = pytest.mark.ci

RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.normal(size=(64, 8)), jnp.float32)
Y = jnp.sum(X, axis=1) / 4 + jnp.asarray(0.1 * RANDOM.normal(size=64), jnp.float32)
PARAMS = {"weights": jnp.zeros(8)}
DATA = (X, Y)
STEPS = 100


def loss_fn(params, data):
    """Return a loss whose gradients are about 1e-9, so that float16 without a loss scale rounds them to zero."""
    x, y = data
    return 1e-9 * jnp.mean((x @ params["weights"] - y) ** 2)


def adam():
    return optax.adam(0.05, eps=1e-15)


def train_step_of(fun, optimizer):
    """Return the training step of a trainer that knows nothing about this library."""

    def train_step(params, opt_state, data):
        loss, grads = jax.value_and_grad(fun)(params, data)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def train(fun, optimizer, steps=STEPS, compiled=jax.jit, params=PARAMS, opt_state=None, data=DATA):
    opt_state = optimizer.init(params) if opt_state is None else opt_state
    return repeat(compiled(train_step_of(fun, optimizer)), params, opt_state, data, steps)


def repeat(train_step, params, opt_state, data=DATA, steps=STEPS):
    """Return the parameters, the state and the losses after some steps."""
    losses = []
    for _ in range(steps):
        params, opt_state, loss = train_step(params, opt_state, data)
        losses.append(float(loss))
    return params, opt_state, losses


@functools.cache
def float32_losses():
    return train(loss_fn, adam())[2]


def is_near_float32(loss, rel=0.02):
    """Return whether a final loss differs by at most this fraction from the float32 loss."""
    return abs(float(loss) / float32_losses()[-1] - 1) <= rel


def assert_trained(losses, state, most_skips=12):
    assert is_near_float32(losses[-1])
    assert int(state.skipped_steps) <= most_skips
    assert state.loss_scale() > 2.0**30


def test_plain_trainer_reaches_the_float32_loss():
    assert float32_losses()[-1] < 0.05 * float32_losses()[0]
    mp = jls.MixedPrecision(adam())
    _, state, losses = train(mp.loss(loss_fn), mp.optimizer)
    assert_trained(losses, state, most_skips=0)
    assert jls.metrics(state)["loss_scale"] == jls.get_loss_scale(state)()
    jls.raise_if_stuck(state)
    assert "not scaled" not in str(jls.diagnostics.explain(state))


def test_autocast_alone_does_not_train():
    _, _, losses = train(jls.autocast(loss_fn), optax.adam(0.05))
    assert losses[-1] == losses[0]


@pytest.mark.parametrize(
    "loss_scale",
    ["auto", jls.DynamicLossScale(2.0**60, increment_period=10), jls.FixedLossScale(2.0**24, skip_nonfinite=True)],
    ids=lambda loss_scale: str(getattr(loss_scale, "name", type(loss_scale).__name__)),
)
def test_every_step_equals_a_step_with_value_and_scaled_grad(loss_scale):
    tx = jls.loss_scaled(adam(), loss_scale, record_bad_steps=True)

    @jax.jit
    def reference(params, opt_state, data):
        loss, grads = jls.value_and_scaled_grad(jls.autocast(loss_fn), opt_state)(params, data)
        params, opt_state = tx.update_and_apply(grads, opt_state, params)
        return params, opt_state, loss

    mp = jls.MixedPrecision(adam(), loss_scale, record_bad_steps=True)
    mp.optimizer.init(PARAMS)
    step = jax.jit(train_step_of(mp.loss(loss_fn), mp.optimizer))
    # If XLA fuses operations, it may round the same arithmetic differently in the two programs.
    rtol = 0.0 if jax.config.read("jax_disable_most_optimizations") else 1e-5
    before = PARAMS, tx.init(PARAMS)
    for number in range(20):
        scale = 1.0 if number % 7 else 1e30  # The data of some steps cause an overflow.
        *ours, _ = step(*before, (scale * X, Y))
        *expected, _ = reference(*before, (scale * X, Y))
        for leaf, other in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
            np.testing.assert_allclose(leaf, other, rtol=rtol)
        before = expected
    assert before[1].skipped_steps >= 3


def test_value_aux_and_gradients_are_unscaled():
    mp = jls.MixedPrecision(adam(), 2.0**30)

    def with_aux(params, data):
        return loss_fn(params, data), {"prediction": data[0] @ params["weights"], "count": 3}

    params = {"weights": jnp.full(8, 0.5)}
    (value, aux), grads = jax.jit(jax.value_and_grad(mp.loss(with_aux), has_aux=True))(params, DATA)
    (expected, expected_aux), exact = jax.value_and_grad(with_aux, has_aux=True)(params, DATA)
    np.testing.assert_allclose(value, expected, rtol=2e-3)
    np.testing.assert_allclose(aux["prediction"], expected_aux["prediction"], atol=2e-3)
    assert int(aux["count"]) == 3
    np.testing.assert_allclose(grads["weights"], exact["weights"], rtol=5e-3)


def test_gradients_can_be_clipped_and_accumulated_outside_of_optax():
    mp = jls.MixedPrecision(adam())
    fun = mp.loss(loss_fn)

    @jax.jit
    def train_step(params, opt_state, data):
        halves = [jax.tree.map(lambda leaf, n=n: leaf[n::2], data) for n in range(2)]
        grads = [jax.grad(fun)(params, half) for half in halves]
        grads = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda leaf: leaf * jnp.minimum(1, 1e-10 / norm), grads)
        updates, opt_state = mp.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = PARAMS, mp.optimizer.init(PARAMS)
    for _ in range(STEPS):
        params, opt_state = train_step(params, opt_state, DATA)
    assert loss_fn(params, DATA) < 0.05 * loss_fn(PARAMS, DATA)
    assert opt_state.skipped_steps <= 8


def test_gradients_can_be_accumulated_by_multi_steps():
    mp = jls.MixedPrecision(optax.MultiSteps(adam(), 2), jls.DynamicLossScale(2.0**60))
    _, state, losses = train(mp.loss(loss_fn), mp.optimizer, steps=2 * STEPS + 20)
    assert is_near_float32(losses[-1])
    assert 10 <= int(state.skipped_steps) <= 20


def test_multi_steps_around_the_optimizer_does_not_recover_from_an_overflow():
    mp = jls.MixedPrecision(adam(), jls.DynamicLossScale(2.0**60))
    _, state, _ = train(mp.loss(loss_fn), optax.MultiSteps(mp.optimizer, 2), steps=2 * STEPS)
    assert state.inner_opt_state.applied_steps == 0
    assert "If the optimizer is inside `optax.MultiSteps`" in str(jls.diagnostics.explain(state))
    with pytest.raises(RuntimeError, match=r"If the optimizer is inside `optax\.MultiSteps`"):
        jls.raise_if_stuck(state)


@pytest.mark.parametrize("fun", [loss_fn, jls.autocast(loss_fn), jls.MixedPrecision(adam(), None).loss(loss_fn)])
def test_an_optimizer_without_its_loss_function_warns(fun):
    mp = jls.MixedPrecision(adam())
    step = jax.jit(train_step_of(fun, mp.optimizer))
    with pytest.warns(UserWarning, match=r"no function returned by `MixedPrecision\.loss` has been called"):
        step(PARAMS, mp.optimizer.init(PARAMS), DATA)


def test_an_optimizer_without_its_loss_function_warns_if_a_gradient_is_constant():
    mp = jls.MixedPrecision(adam())
    params = PARAMS | {"unused": jnp.zeros(2)}
    step = jax.jit(lambda grads, state: mp.optimizer.update(grads | {"unused": np.zeros(2, np.float32)}, state, params))
    with pytest.warns(UserWarning, match=r"no function returned by `MixedPrecision\.loss` has been called"):
        step(PARAMS, mp.optimizer.init(params))


def in_jit(fun):
    return jax.grad(jax.jit(fun))


@pytest.mark.parametrize("differentiate", [jax.grad, in_jit, lambda fun: jax.jit(jax.grad(fun))])
def test_a_loss_function_without_its_optimizer_warns(differentiate):
    mp = jls.MixedPrecision(adam())
    fun = mp.loss(loss_fn)
    fun(PARAMS, DATA)
    with pytest.warns(UserWarning, match=r"`MixedPrecision\.optimizer` has not been initialized"):
        differentiate(fun)(PARAMS, DATA)
    mp.optimizer.init(PARAMS)
    differentiate(fun)(PARAMS, DATA)  # In the tests, warnings are errors.


@pytest.mark.parametrize("loss_scale", [None, jls.FixedLossScale(2.0**20)])
def test_a_loss_function_that_needs_no_optimizer_does_not_warn(loss_scale):
    jax.grad(jls.MixedPrecision(adam(), loss_scale).loss(loss_fn))(PARAMS, DATA)


def test_a_float16_loss_warns():
    mp = jls.MixedPrecision(adam())
    with pytest.warns(UserWarning, match="The loss is float16, which cannot represent a loss scale above 32768"):
        jax.jit(mp.loss(lambda params, data: loss_fn(params, data).astype(jnp.float16)))(PARAMS, DATA)


@pytest.mark.parametrize(
    "call",
    [
        lambda method: method(PARAMS, DATA),
        lambda method: method(PARAMS, data=DATA),
        lambda method: jax.value_and_grad(method)(PARAMS, DATA),
        lambda method: jax.jit(method, static_argnums=1)(PARAMS, 3),
    ],
)
def test_the_method_loss_that_is_passed_instead_of_its_result_is_named(call):
    mp, advice = jls.MixedPrecision(adam()), r"Pass `mp\.loss\(loss_fn\)` to the trainer instead of"
    with pytest.raises(TypeError, match=rf"takes one argument, .* {advice}"):
        call(mp.loss)
    with pytest.raises(ValueError, match=rf"must be a function, .* {advice}"):
        jax.grad(mp.loss)(PARAMS)


def test_an_attribute_of_the_inner_state_is_named():
    """For example, nanodo reads `gradient_step` of the state of `optax.MultiSteps`."""
    state = jls.MixedPrecision(optax.MultiSteps(adam(), 2)).optimizer.init(PARAMS)
    with pytest.raises(AttributeError, match=r"does\. Use `state\.inner_state\.gradient_step`"):
        _ = state.gradient_step
    assert state.inner_state.gradient_step == 0
    with pytest.raises(AttributeError, match=r"no attribute 'other'\.$"):
        _ = state.other
    assert not hasattr(state, "gradient_step")
    assert getattr(state, "gradient_step", None) is None
    for copied in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state._replace()):
        assert jax.tree.structure(copied) == jax.tree.structure(state)


def test_an_object_that_is_passed_instead_of_its_optimizer_is_named():
    mp = jls.MixedPrecision(adam())
    with pytest.raises(AttributeError, match=r"no attribute 'init'\. Pass `mp\.optimizer` instead of `mp`"):
        mp.init(PARAMS)
    assert not hasattr(mp, "opt_state")


def donating(train_step):
    return jax.jit(train_step, donate_argnums=(0, 1))


def compiled_ahead_of_time(train_step):
    compiled = None

    def step(*args):
        nonlocal compiled
        compiled = compiled or jax.jit(train_step).lower(*args).compile()
        return compiled(*args)

    return step


@pytest.mark.parametrize("compiled", [donating, compiled_ahead_of_time])
def test_ways_of_compiling(compiled):
    mp = jls.MixedPrecision(adam())
    params = jax.tree.map(jnp.copy, PARAMS)
    _, state, losses = train(mp.loss(loss_fn), mp.optimizer, compiled=compiled, params=params)
    assert_trained(losses, state)


def test_steps_in_a_scan_with_cond():
    mp = jls.MixedPrecision(adam())
    step = train_step_of(mp.loss(loss_fn), mp.optimizer)

    def body(carry, number):
        params, opt_state = carry
        taken = jax.lax.cond(number % 2 == 0, lambda: step(params, opt_state, DATA)[:2], lambda: carry)
        return taken, loss_fn(taken[0], DATA)

    start = PARAMS, mp.optimizer.init(PARAMS)
    (_, state), losses = jax.jit(lambda carry: jax.lax.scan(body, carry, jnp.arange(2 * STEPS)))(start)
    assert is_near_float32(losses[-1], 0.1)
    assert int(state.applied_steps) + int(state.skipped_steps) == STEPS
    assert state.loss_scale() > 2.0**30


@any_jax.needs_jax("0.9.0", "there is no flax for both")
def test_nnx_jit():
    from flax import nnx

    mp = jls.MixedPrecision(adam())
    model = nnx.Linear(8, 1, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, mp.optimizer, wrt=nnx.Param)
    fun = mp.loss(lambda model, x, y: 1e-9 * jnp.mean((model(x)[:, 0] - y) ** 2))

    @nnx.jit
    def train_step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(fun)(model, x, y)
        optimizer.update(model, grads)
        return loss

    losses = [float(train_step(model, optimizer, *DATA)) for _ in range(STEPS)]
    assert is_near_float32(losses[-1])
    assert jls.metrics(optimizer)["loss_scale"] > 2.0**30


def mesh_of(axis_type, devices=8):
    return jax.make_mesh((devices,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:devices])


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("devices", "is_set"), [(2, False), (2, True), (8, True)])
def test_several_devices(axis_type, is_set, devices):
    mesh = mesh_of(axis_type, devices)
    mp = jls.MixedPrecision(adam())
    data = jax.device_put(DATA, NamedSharding(mesh, P("data")))
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    with any_jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        _, state, losses = train(mp.loss(loss_fn), mp.optimizer, params=params, data=data)
    assert_trained(losses, state)


def on_the_third_device(tree):
    return jax.device_put(tree, jax.devices()[2])


def on_a_mesh_of_one_device(tree):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[2:3])
    return jax.device_put(tree, NamedSharding(mesh, P()))


@pytest.mark.parametrize("place", [on_the_third_device, on_a_mesh_of_one_device])
def test_one_device_that_is_not_the_default(place):
    mp = jls.MixedPrecision(adam())
    params, state, losses = train(mp.loss(loss_fn), mp.optimizer, params=place(PARAMS), data=place(DATA))
    assert_trained(losses, state)
    assert params["weights"].devices() == {jax.devices()[2]}


def test_arguments_on_a_device_are_compiled_only_once():
    mp = jls.MixedPrecision(adam())
    step = jax.jit(train_step_of(mp.loss(loss_fn), mp.optimizer))
    repeat(step, *jax.device_put((PARAMS, mp.optimizer.init(PARAMS)), jax.devices()[0]), steps=3)
    assert step._cache_size() == 1


def test_first_use_under_a_transfer_guard():
    mp = jls.MixedPrecision(adam())
    state, step = mp.optimizer.init(PARAMS), jax.jit(train_step_of(mp.loss(loss_fn), mp.optimizer))
    with jax.transfer_guard("disallow"):
        step(PARAMS, state, DATA)


def moved_to_the_mesh(mp, replicated):
    return jax.device_put((PARAMS, mp.optimizer.init(PARAMS)), replicated)


def moved_from_a_device_to_the_mesh(mp, replicated):
    params = jax.device_put(PARAMS, jax.devices()[0])
    return jax.device_put((params, mp.optimizer.init(params)), replicated)


def created_by_a_compiled_function(mp, replicated):
    return jax.jit(lambda: (PARAMS, mp.optimizer.init(PARAMS)), out_shardings=replicated)()


def restored_from_host_arrays(mp, replicated):
    return jax.device_put(PARAMS, replicated), jax.tree.map(np.asarray, mp.optimizer.init(PARAMS))


PLACES = [
    moved_to_the_mesh,
    moved_from_a_device_to_the_mesh,
    created_by_a_compiled_function,
    restored_from_host_arrays,
]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_the_mesh_of_the_arguments_is_used(place, axis_type):
    mesh = mesh_of(axis_type)
    mp = jls.MixedPrecision(adam())
    params, state = place(mp, NamedSharding(mesh, P()))
    data = jax.device_put(DATA, NamedSharding(mesh, P("data")))
    _, state, _ = train(mp.loss(loss_fn), mp.optimizer, 3, params=params, opt_state=state, data=data)
    assert state.applied_steps == 3
    assert state.loss_scale() > 2.0**15


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_unknown_devices_raise_an_error_that_names_the_argument_mesh(place, axis_type):
    mesh = mesh_of(axis_type, 2)
    data = jax.device_put(DATA, NamedSharding(mesh, P("data")))

    def run(mp):
        params, state = place(mp, NamedSharding(mesh, P()))
        return jax.jit(train_step_of(mp.loss(loss_fn), mp.optimizer))(params, state, data)

    fix = r"Create `MixedPrecision\(optimizer, mesh=mesh\)`"
    with pytest.raises(ValueError, match=rf"cannot determine the 2 devices of the training step\. {fix}"):
        run(jls.MixedPrecision(adam()))
    assert run(jls.MixedPrecision(adam(), mesh=mesh))[1].applied_steps == 1


@pytest.mark.parametrize("is_set", [True, False])
def test_first_use_outside_of_the_mesh_raises_an_error(is_set):
    mesh = mesh_of(AxisType.Auto)
    mp = jls.MixedPrecision(adam())
    mp.optimizer.init(PARAMS)
    fun = mp.loss(loss_fn)
    fun(PARAMS, DATA)
    params = PARAMS if is_set else jax.device_put(PARAMS, NamedSharding(mesh, P()))
    message = r"a mesh of 8 devices, but the loss scale is stored on 1\. .*mesh=mesh"
    with any_jax.set_mesh(mesh) if is_set else contextlib.nullcontext(), pytest.raises(ValueError, match=message):
        jax.jit(jax.grad(fun))(params, DATA)


def shard_mapped(train_step):
    mesh = mesh_of(AxisType.Auto)
    specs = {"mesh": mesh, "in_specs": (P(), P(), P("data")), "out_specs": (P(), P(), P())}
    return jax.jit(jax.shard_map(train_step, **specs))


def pmapped(train_step):
    step = jax.pmap(train_step, "data", in_axes=(None, None, 0), out_axes=(None, None, 0))

    def with_split_data(params, opt_state, data):
        split = jax.tree.map(lambda leaf: leaf.reshape(8, 8, *leaf.shape[1:]), data)
        params, opt_state, losses = jax.block_until_ready(step(params, opt_state, split))
        return params, opt_state, losses[0]

    return with_split_data


def train_data_parallel(mp, fun, wrap, steps, mapped=shard_mapped):
    def train_step(params, opt_state, data):
        own = any_jax.pcast(params, "data", to="varying") if mapped is shard_mapped else params
        loss, grads = jax.value_and_grad(fun)(own, data)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        updates, opt_state = mp.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return repeat(mapped(wrap(train_step)), PARAMS, mp.optimizer.init(PARAMS), DATA, steps)


@pytest.mark.parametrize("mapped", [shard_mapped, pmapped])
def test_data_parallel_training_with_the_third_line(mapped):
    mp = jls.MixedPrecision(adam(), axis_name="data")
    _, state, losses = train_data_parallel(mp, mp.loss(loss_fn), mp.step, STEPS, mapped)
    assert_trained(losses, state)


THIRD_LINE = r"train_step = mp\.step\(train_step\)"


def test_without_the_third_line_shard_map_raises_an_error_that_shows_it():
    mp = jls.MixedPrecision(adam(), axis_name="data")
    with pytest.raises(ValueError, match=THIRD_LINE):
        train_data_parallel(mp, mp.loss(loss_fn), lambda step: step, 1)
    with pytest.raises(ValueError, match=THIRD_LINE):  # The update also reads the references.
        train_data_parallel(mp, loss_fn, lambda step: step, 1)


@any_jax.needs_jax("0.9.0", "JAX itself raises an error")
def test_without_the_third_line_pmap_raises_an_error_that_shows_it():
    mp = jls.MixedPrecision(adam())
    with pytest.raises(ValueError, match=THIRD_LINE):
        jax.pmap(jax.grad(mp.loss(lambda w: 1e-9 * jnp.sum(w**2))))(jnp.ones((8, 2)))


def test_an_ensemble_by_vmap_needs_the_third_line():
    mp = jls.MixedPrecision(adam())
    step = train_step_of(mp.loss(loss_fn), mp.optimizer)
    params = {"weights": jnp.stack([jnp.zeros(8), jnp.ones(8)])}
    states = jax.vmap(mp.optimizer.init)(params)
    over_members = (0, 0, None)
    with pytest.raises(ValueError, match=THIRD_LINE):
        jax.jit(jax.vmap(step, over_members))(params, states, DATA)
    compiled = jax.jit(jax.vmap(mp.step(step), over_members))
    for _ in range(STEPS):
        params, states, losses = compiled(params, states, DATA)
    assert is_near_float32(losses[0])
    assert (states.loss_scale() > 2.0**30).all()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Thousand(jls.LossScale):
    """A user-defined loss scale without arrays."""

    def __call__(self):
        return jnp.float32(1000)

    def adjust(self, grads_finite):
        return self

    def get_config(self):
        return {}


def test_an_ensemble_by_vmap_with_a_loss_scale_without_arrays_needs_no_third_line():
    mp = jls.MixedPrecision(optax.sgd(1e8), Thousand())
    params = {"weights": jnp.stack([jnp.zeros(8), jnp.ones(8)])}
    states = jax.vmap(mp.optimizer.init)(params)
    step = jax.jit(jax.vmap(train_step_of(mp.loss(loss_fn), mp.optimizer), (0, 0, None)))
    (params, *_), member = step(params, states, DATA), {"weights": jnp.ones(8)}
    expected, *_ = train(loss_fn, optax.sgd(1e8), 1, params=member)
    np.testing.assert_allclose(params["weights"][1], expected["weights"], rtol=0.05)


def test_the_body_of_a_loop_inside_vmap_needs_the_third_line():
    """This is how purejaxrl trains several seeds."""
    mp = jls.MixedPrecision(adam(), jls.DynamicLossScale(2.0**60))

    def train(wrap, seed):
        step = wrap(train_step_of(mp.loss(loss_fn), mp.optimizer))
        params = {"weights": jnp.full(8, seed)}
        carry = params, mp.optimizer.init(params)
        return jax.lax.scan(lambda carry, _: (step(*carry, DATA)[:2], None), carry, length=30)[0]

    def train_seeds(wrap):
        return jax.jit(jax.vmap(functools.partial(train, wrap)))(jnp.arange(3.0))

    with pytest.raises(ValueError, match=rf"{THIRD_LINE}`\. If the training step is the body of a loop, .* wrap this"):
        train_seeds(lambda step: step)
    _, states = train_seeds(mp.step)
    assert (states.applied_steps >= 10).all()
    assert (states.skipped_steps >= 10).all()


def test_the_body_of_a_scan_inside_pmap_needs_the_third_line():
    mp = jls.MixedPrecision(adam(), jls.DynamicLossScale(2.0**60))
    train_step = train_step_of(mp.loss(loss_fn), mp.optimizer)

    def body(carry, _):
        params, opt_state, loss = train_step(*carry, DATA)
        return (params, opt_state), loss

    def epoch(body, carry):
        return jax.lax.scan(body, carry, length=60)[0][1]

    carry = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (PARAMS, mp.optimizer.init(PARAMS)))
    skipped = [
        int(jax.pmap(mp.step(functools.partial(epoch, body)), devices=jax.devices()[:1])(carry).skipped_steps[0])
        for body in (body, mp.step(body))
    ]
    assert skipped[0] == 60
    assert 0 < skipped[1] < 30


def test_step_rejects_a_compiled_function_and_arguments_without_a_state():
    mp = jls.MixedPrecision(adam())
    compiled = jax.jit(train_step_of(mp.loss(loss_fn), mp.optimizer))
    with pytest.raises(ValueError, match="got a compiled function"):
        mp.step(compiled)(PARAMS, mp.optimizer.init(PARAMS), DATA)
    with pytest.raises(ValueError, match=r"`MixedPrecision\.step\(train_step\)\(\.\.\.\)` must be or contain"):
        mp.step(lambda params: params)(PARAMS)


def in_a_scan(fun):
    def body(params, data):
        return params, fun(params, data)

    return lambda params, data: jax.lax.scan(body, params, jax.tree.map(lambda leaf: leaf[None], data))[1][0]


@any_jax.needs_jax("0.8.0", "the caches of traces ignore user contexts")
@pytest.mark.parametrize("transformed", [jax.jit, jax.checkpoint, in_a_scan])
def test_traces_inside_of_a_step_are_not_reused(transformed):
    """JAX stores the traces of nested functions, but each step has its own loss scale."""
    mp = jls.MixedPrecision(adam(), jls.DynamicLossScale(2.0**60))
    mp.optimizer.init(PARAMS)
    fun = transformed(mp.loss(loss_fn))
    jax.grad(fun)(PARAMS, DATA)
    step = train_step_of(fun, mp.optimizer)
    steps = [jax.jit(mp.step(step)), jax.jit(mp.step(lambda *args: step(*args)))]
    params, state = PARAMS, mp.optimizer.init(PARAMS)
    for number in range(STEPS + 20):
        params, state, loss = jax.block_until_ready(steps[number % 2](params, state, DATA))
    assert is_near_float32(loss)
    jax.grad(fun)(PARAMS, DATA)

    members = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), PARAMS)
    states = jax.vmap(mp.optimizer.init)(members)
    compiled = jax.jit(jax.vmap(mp.step(step), (0, 0, None)))
    for _ in range(20):
        members, states, _ = compiled(members, states, DATA)
    assert (states.applied_steps > 0).all()


def test_a_step_outside_of_jit_does_not_affect_later_updates():
    mp = jls.MixedPrecision(adam(), jls.DynamicLossScale(2.0**60))
    step, state = train_step_of(mp.loss(loss_fn), mp.optimizer), mp.optimizer.init(PARAMS)
    mp.step(step)(PARAMS, state, DATA)
    assert repeat(step, PARAMS, state, steps=20)[1].applied_steps > 0


def test_export_with_the_third_line():
    mp = jls.MixedPrecision(adam())
    args = PARAMS, mp.optimizer.init(PARAMS), DATA
    step = train_step_of(mp.loss(loss_fn), mp.optimizer)
    _, state, _ = jax.export.export(jax.jit(mp.step(step)))(*args).call(*args)
    assert state.applied_steps == 1


def test_step_selects_a_state_by_its_path():
    mp = jls.MixedPrecision(adam(), 2.0**30)
    other = jls.loss_scaled(adam(), 2.0)
    seen = []

    def train_step(states):
        seen.append(jax.grad(mp.loss(loss_fn))(PARAMS, DATA))
        return states

    states = {"ours": mp.optimizer.init(PARAMS), "other": other.init(PARAMS)}
    jax.jit(mp.step(train_step, "[0][0]['ours']"))(states)
    assert len(seen) == 1
    with pytest.raises(ValueError, match="exactly one"):
        jax.jit(mp.step(train_step))(states)


LARGE = 3e12  # The gradients of this multiple of the loss overflow at the initial scales.


@pytest.mark.parametrize(
    ("loss_scale", "factor", "growth"),
    [
        *(("dynamic", LARGE, 1), ("auto", LARGE, 1), (jls.AutoLossScale(2.0**30), LARGE, 1)),
        (jls.DynamicLossScale(8.0, increment_period=1), 1.0, 4),  # grows in the second and third step after a restart
    ],
    ids=str,
)
def test_a_restart_does_not_change_the_scale(loss_scale, factor, growth):
    """The first step after a restart uses the initial scale, which is either too high or below the restored scale."""

    def run(saved, steps):
        mp = jls.MixedPrecision(optax.sgd(0.0), loss_scale, record_bad_steps=True)
        step = jax.jit(train_step_of(mp.loss(lambda params, data: factor * loss_fn(params, data)), mp.optimizer))
        state = mp.optimizer.init(PARAMS)
        initial = state.loss_scale()
        state = state if saved is None else jax.tree.map(lambda _, leaf: jnp.asarray(leaf), state, saved)
        for _ in range(steps):
            _, state, _ = step(PARAMS, state, DATA)
        return initial, jax.tree.map(np.asarray, state)

    initial, saved = run(None, 30)
    scale, is_too_high = saved.loss_scale(), factor == LARGE
    assert saved.applied_steps > 0
    assert scale < initial if is_too_high else scale > initial
    for restart in range(2):
        _, restored = run(saved, 3)
        scale *= growth
        assert restored.loss_scale() == scale
        assert restored.skipped_steps == saved.skipped_steps + is_too_high
        if is_too_high:
            assert restored.monitoring.last_bad_step.loss_scale == initial, restart
        saved = restored


def reset_as_in_troubleshooting(state, mp):
    return state._replace(loss_scale=mp.optimizer.init(PARAMS).loss_scale)


def reset_as_in_checkpoints(state, mp):
    return optax.tree.set(state, loss_scale=jls.DynamicLossScale(2.0**20))


def restored_from_a_checkpoint(state, mp):
    return state._replace(loss_scale=dataclasses.replace(state.loss_scale, current_loss_scale=2.0**30))


@pytest.mark.parametrize("loss_scale", ["dynamic", "auto"])
@pytest.mark.parametrize("replace", [reset_as_in_troubleshooting, reset_as_in_checkpoints, restored_from_a_checkpoint])
def test_a_replaced_scale_is_used(replace, loss_scale):
    mp = jls.MixedPrecision(adam(), loss_scale)
    step = jax.jit(train_step_of(mp.loss(loss_fn), mp.optimizer))
    _, state, _ = repeat(step, PARAMS, mp.optimizer.init(PARAMS), (jnp.nan * X, Y), 30)
    assert state.loss_scale() <= 1
    state = replace(state, mp)
    replaced = float(state.loss_scale())
    assert replaced > 1
    _, state, _ = step(PARAMS, state, DATA)  # The gradients of this step were computed at the old scale.
    assert state.loss_scale() == replaced
    # The next gradients are computed at the new scale, which is smaller than necessary, so some of them are zero.
    exact = jls.value_and_scaled_grad(jls.autocast(loss_fn), replaced)(PARAMS, DATA)[1]["weights"] / replaced
    np.testing.assert_allclose(jax.grad(mp.loss(loss_fn))(PARAMS, DATA)["weights"], exact, rtol=1e-5)


@pytest.mark.parametrize(("loss_scale", "other"), [("auto", "dynamic"), ("dynamic", None)])
def test_state_with_another_class_of_loss_scale(loss_scale, other):
    mp = jls.MixedPrecision(adam(), loss_scale)
    state = mp.optimizer.init(PARAMS)._replace(loss_scale=jls.get(other))
    _, state, _ = train(mp.loss(loss_fn), mp.optimizer, 2, opt_state=state)
    assert type(state.loss_scale) is type(jls.get(other))


def test_state_with_a_loss_scale_is_rejected_by_an_object_without_loss_scale():
    other = jls.MixedPrecision(adam(), "dynamic").optimizer.init(PARAMS)
    mp = jls.MixedPrecision(adam(), None)
    with pytest.raises(ValueError, match="different loss scale"):
        train_step_of(mp.loss(loss_fn), mp.optimizer)(PARAMS, other, DATA)


def test_loss_can_be_evaluated_outside_of_a_step():
    mp = jls.MixedPrecision(adam())
    fun = mp.loss(loss_fn)
    np.testing.assert_allclose(fun(PARAMS, DATA), loss_fn(PARAMS, DATA), rtol=2e-3)
    _, state, losses = train(fun, mp.optimizer)
    assert_trained(losses, state)
    np.testing.assert_allclose(jax.jit(fun)(PARAMS, DATA), loss_fn(PARAMS, DATA), rtol=2e-3)
    # The gradients outside of a step use the scale of the last update.
    grads, exact = (jax.grad(each)(PARAMS, DATA)["weights"] for each in (fun, loss_fn))
    np.testing.assert_allclose(grads, exact, rtol=1e-2)


def test_two_optimizers_have_independent_scales():
    small, large = jls.MixedPrecision(adam()), jls.MixedPrecision(adam())
    of_small = small.loss(loss_fn)
    of_large = large.loss(lambda params, data: 1e12 * loss_fn(params, data))

    @jax.jit
    def train_step(a, b, data):
        return train_step_of(of_small, small.optimizer)(*a, data), train_step_of(of_large, large.optimizer)(*b, data)

    a, b = (PARAMS, small.optimizer.init(PARAMS)), (PARAMS, large.optimizer.init(PARAMS))
    for _ in range(STEPS):
        (*a, loss_a), (*b, loss_b) = train_step(a, b, DATA)
    assert_trained([float(loss_a)], a[1])
    assert is_near_float32(loss_b / 1e12)
    assert a[1].loss_scale() > 2.0**20 * b[1].loss_scale()


def test_one_object_for_losses_of_very_different_size_is_reported_as_stuck():
    """Each loss function is evaluated at the scale of the other one, so each optimizer needs a separate object."""
    mp = jls.MixedPrecision(adam())
    small = train_step_of(mp.loss(lambda params, data: 1e-2 * loss_fn(params, data)), mp.optimizer)
    large = train_step_of(mp.loss(lambda params, data: 1e11 * loss_fn(params, data)), mp.optimizer)

    @jax.jit
    def train(models):
        return jax.lax.fori_loop(
            0, 1000, lambda _, models: (small(*models[0], DATA)[:2], large(*models[1], DATA)[:2]), models
        )

    models = train(((PARAMS, mp.optimizer.init(PARAMS)), (PARAMS, mp.optimizer.init(PARAMS))))
    assert models[0][1].monitoring.largest == 0
    with pytest.raises(RuntimeError, match="The last 1000 steps were skipped"):
        jls.raise_if_stuck(models[1][1])


@pytest.mark.parametrize("loss_scale", [None, "auto"])
def test_bfloat16(loss_scale):
    mp = jls.MixedPrecision(adam(), loss_scale, dtype=jnp.bfloat16)
    _, state, losses = train(mp.loss(loss_fn), mp.optimizer)
    assert is_near_float32(losses[-1], 0.5)
    assert int(state.applied_steps) == STEPS


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_raise_an_error_with_the_reason(copied):
    with pytest.raises(TypeError, match="share one loss scale"):
        copied(jls.MixedPrecision(adam()))


def test_a_copied_optimizer_shares_the_scale():
    mp = jls.MixedPrecision(adam())
    _, state, losses = train(mp.loss(loss_fn), copy.deepcopy(mp.optimizer))
    assert_trained(losses, state)
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(mp.optimizer.update.__self__.shared)


@pytest.mark.parametrize(
    "optimizer", [adam(), optax.sgd(0.1), jls.master_weights(adam()), jls.stochastic_rounding(adam())]
)
def test_float16_parameters_warn_about_small_gradients(optimizer):
    with pytest.warns(UserWarning, match="unscaled gradients below 3e-8 are rounded to zero"):
        jls.MixedPrecision(optimizer).optimizer.init({"weights": jnp.zeros(8, jnp.float16)})


def test_bfloat16_parameters_warn_that_they_are_not_used_in_float16():
    weights = jnp.ones((8, 8), jnp.bfloat16)

    def is_in_float16(weights):
        mp = jls.MixedPrecision(adam())
        return "f16[" in str(jax.make_jaxpr(mp.loss(lambda w: jnp.sum(w @ X.T)))(weights)).replace("bf16[", "")

    with pytest.warns(UserWarning, match="multiplications with bfloat16 parameters are not computed in float16"):
        jls.MixedPrecision(adam()).optimizer.init(weights)
    with pytest.warns(UserWarning, match=r"`params = jls.cast_floating\(params, jnp.float32\)`\. If the"):
        jls.MixedPrecision(adam(), None, dtype=jnp.bfloat16).optimizer.init(weights)
    # The statement of the warning is true.
    assert not is_in_float16(weights)
    assert is_in_float16(weights.astype(jnp.float32))


def test_threshold_in_the_warning_about_lost_updates():
    for dtype, share in (jnp.bfloat16, 512), (jnp.float16, 4096):
        weight = jnp.ones((), dtype)
        assert optax.apply_updates(weight, jnp.float32(0.99 / share)) == weight
        assert optax.apply_updates(weight, jnp.float32(-1.01 / share)) != weight


def test_errors_about_other_wrappers_name_the_class():
    with pytest.raises(ValueError, match=r"`MixedPrecision\(optax\.masked\(inner, mask\)\)`"):
        optax.masked(jls.MixedPrecision(adam()).optimizer, {"weights": False}).init(PARAMS)
    with pytest.raises(ValueError, match=r"`MixedPrecision\(optimizer=\.\.\.\)` already contains"):
        jls.MixedPrecision(jls.loss_scaled(adam())).optimizer.init(PARAMS)
