"""Training on a (2, 4) mesh in the configurations of large runs, compared with training on one device."""

import functools
import signal
import sys
import warnings
from subprocess import PIPE

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from any_jax import needs_jax, set_mesh
from jax.sharding import NamedSharding
from programs.on_a_mesh import OVERFLOWS, PARAMS, SPECS, batch_of, begin, compiled_step, mesh_of, placed, train
from programs.starting import started

import jax_lossscale as jls

pytestmark = pytest.mark.ci

STEPS = 12
REPLICATED = dict.fromkeys(PARAMS, jax.P())
LABELS = {"kernel": "adam", "bias": "sgd", "readout": "adam"}
# For each configuration: the specs of the parameters, the specs of the moments, and the optimizer.
CONFIGURATIONS = {
    "FSDP and tensor parallelism": (SPECS, SPECS, lambda: jls.loss_scaled(optax.adamw(1e-2))),
    "ZeRO-1": (REPLICATED, SPECS, lambda: jls.loss_scaled(optax.adamw(1e-2))),
    "MultiSteps": (SPECS, SPECS, lambda: jls.loss_scaled(optax.MultiSteps(optax.adamw(1e-2), 2))),
    "schedule-free": (SPECS, SPECS, lambda: jls.loss_scaled(optax.contrib.schedule_free_adamw(1e-2, warmup_steps=3))),
    "partition": (
        SPECS,
        SPECS,
        lambda: jls.loss_scaled(optax.multi_transform({"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-2)}, LABELS)),
    ),
}


def run_of(tx, params, state, put_batch, out_shardings=None):
    """Return the parameters and the state after all steps, and the loss scale after each step."""
    step = compiled_step(tx, out_shardings)
    scales = []
    for number in range(STEPS):
        params, state = step(params, state, put_batch(batch_of(number)))
        scales.append(float(state.loss_scale()))
    return params, state, scales


def assert_nearly_equal(params, expected):
    """Compare the changes of the parameters. Float16 sums depend on the mesh, and Adam enlarges small differences."""
    params, expected = jax.device_get((params, expected))
    for name, initial in PARAMS.items():
        change = np.linalg.norm(expected[name] - initial)
        assert np.linalg.norm(params[name] - expected[name]) < 0.05 * change, name


@pytest.mark.parametrize(
    ("name", "is_set"),
    [
        *(("FSDP and tensor parallelism", False), ("FSDP and tensor parallelism", True), ("ZeRO-1", True)),
        *(("MultiSteps", False), ("schedule-free", True), ("partition", False)),
    ],
)
def test_training_on_a_mesh_equals_training_on_one_device(name, is_set):
    specs_of_params, specs_of_moments, make = CONFIGURATIONS[name]
    mesh = mesh_of(2, 4)
    with set_mesh(mesh) if is_set else warnings.catch_warnings():
        params = placed(mesh, PARAMS, specs_of_params)
        state = placed(mesh, make().init(params), specs_of_moments)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
        put = functools.partial(jax.device_put, device=NamedSharding(mesh, jax.P("data")))
        params, state, scales = run_of(make(), params, state, put, shardings)
    start = jax.tree.map(jnp.asarray, PARAMS)
    expected_params, expected_state, expected_scales = run_of(make(), start, make().init(start), lambda batch: batch)
    assert np.abs(expected_params["kernel"] - PARAMS["kernel"]).max() > 1e-2
    assert scales == expected_scales
    assert int(state.skipped_steps) == int(expected_state.skipped_steps) >= len(OVERFLOWS)
    assert_nearly_equal(params, expected_params)
    for leaf, sharding in zip(jax.tree.leaves((params, state)), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.slow
@needs_jax("0.7.1", "`jax.sharding.set_mesh` is not a context manager, and orbax 0.12.8 uses it as one")
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.filterwarnings("ignore")  # The warnings come from orbax.
def test_run_killed_while_orbax_saves_continues_on_another_mesh(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    errors = tmp_path / "stderr"
    folder = tmp_path / "checkpoints"
    with started("on_a_mesh.py", folder, 1000, devices=8, errors=errors, stdout=PIPE) as process:
        assert any(line.strip() == "9" for line in iter(process.stdout.readline, "")), errors.read_text()
        process.kill()
        assert process.wait() == -signal.SIGKILL, errors.read_text()

    mesh = mesh_of(4, 2)

    def abstract(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    target = jax.tree.map(abstract, begin(mesh))
    with ocp.CheckpointManager(folder) as manager:
        last = manager.latest_step()
        assert last >= 5
        run = manager.restore(last, args=ocp.args.StandardRestore(target))
    assert run["params"]["kernel"].sharding.mesh.shape == {"data": 4, "model": 2}
    *_, (_, run) = train(run, range(last + 1, last + 10), mesh)
    *_, (_, expected) = train(begin(mesh_of(2, 4)), range(last + 10), mesh_of(2, 4))
    assert run["state"].loss_scale() == expected["state"].loss_scale()
    assert run["state"].skipped_steps == expected["state"].skipped_steps == len(OVERFLOWS)
    assert_nearly_equal(run["params"], expected["params"])
