"""The compiled step on a mesh: what it holds, and that it can be kept, in a cache or in a file, for another process."""

import itertools
import re
from collections import Counter
from subprocess import PIPE

import jax
import jax.export
import numpy as np
import optax
import pytest
from any_jax import MORE_COLLECTIVES, NO_EXPORT, needs_jax, set_mesh, skip_before
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import cached
from programs.starting import started

import jax_lossscale as jls

COLLECTIVES = r"\s(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
MESH = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
TX = jls.loss_scaled(optax.sgd(0.1), jls.DynamicLossScale(8.0))
MEASURING = jls.loss_scaled(optax.sgd(0.1), jls.AutoLossScale(8.0))
PROGRAMS = {
    "all_finite": (TX, lambda grads, state, params: jls.all_finite(grads)),
    "update": (TX, TX.update),
    "update_and_apply": (TX, TX.update_and_apply),
    "update_and_apply, measuring": (MEASURING, MEASURING.update_and_apply),
}
# (shape of the mesh, specs of the leaves, all-reduces with auto axes). There XLA for a CPU makes an all-reduce for each
# dimension that is split; for a GPU it folds those of one leaf into one, as `python -m benchmarks cuda` reads.
SPLITS = {
    "one axis": ((8,), [P("data")], 1),
    "one axis, not all leaves": ((8,), [P("data"), P(), P(None, "data"), P(None, None, "data")], 1),
    "two axes, split over one": ((4, 2), [P("model"), P(None, "model"), P()], 1),
    "two axes, one dimension": ((4, 2), [P(("data", "model")), P(None, ("data", "model"))], 1),
    "two axes, two dimensions": ((2, 4), [P("data", "model"), P(None, "data", "model")], 2),
    "two axes, each by itself": ((4, 2), [P("data"), P(None, "model"), P()], 2),
    "two axes, split in all ways": (
        (2, 4),
        [P("data"), P(None, "model"), P("model", "data"), P(("data", "model")), P()],
        3,
    ),
    "nothing is split": ((4, 2), [P()], 0),
}
SHAPES = ((16, 512, 8), (8, 16, 8))  # of leaves that one device reads alone, and in a block with others


def mesh_of(shape, axis_type):
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(axis_type,) * len(shape))


def leaves_on(mesh, specs, number):
    shapes = [SHAPES[n // len(specs) % len(SHAPES)] for n in range(number)]
    return [
        jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, specs[n % len(specs)]))
        for n, shape in enumerate(shapes)
    ]


CASES = [(split, "all_finite") for split in SPLITS]
CASES += itertools.product(["one axis"], tuple(PROGRAMS)[1:])


@needs_jax("0.7.2", MORE_COLLECTIVES)
@pytest.mark.parametrize("axis_type", MESH)
@pytest.mark.parametrize(("split", "program"), CASES)
def test_the_verdict_costs_as_many_scalar_all_reduces_whatever_the_number_of_leaves(split, axis_type, program):
    shape, specs, with_auto_axes = SPLITS[split]
    expected = with_auto_axes if axis_type == "auto" else min(with_auto_axes, 1)
    mesh = mesh_of(shape, MESH[axis_type])
    with set_mesh(mesh):
        for number in len(specs), 16:
            params = leaves_on(mesh, specs, number)
            tx, function = PROGRAMS[program]
            lowered = jax.jit(function).lower(params, tx.init(params), params)
            text = lowered.compile().as_text()
            assert Counter(re.findall(COLLECTIVES, text)) == Counter({"all-reduce": expected} if expected else {})
            reduced = re.findall(r" = (.*) all-reduce(?:-start)?\(", text)
            assert all(set(re.findall(r"\w+\[.*?\]", result)) <= {"pred[]", "s32[]", "f32[]"} for result in reduced)
            assert "custom_call" not in lowered.as_text()  # as a callback would be


@pytest.mark.parametrize("axis_type", MESH)
def test_a_sharded_step_is_exported_stored_and_called_again(axis_type):
    if axis_type == "explicit":
        skip_before("0.7.1", NO_EXPORT)
    mesh = mesh_of((4, 2), MESH[axis_type])
    tx = jls.loss_scaled(optax.adam(0.1), jls.DynamicLossScale(8.0))
    params = {
        "kernel": jax.device_put(np.ones((16, 4), np.float32), NamedSharding(mesh, P("data", "model"))),
        "bias": jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P())),
    }
    spoiled = np.ones((16, 4), np.float32)
    spoiled[11, 2] = np.nan
    bad = {**params, "kernel": jax.device_put(spoiled, params["kernel"].sharding)}

    def of_leaves(grads, state_leaves, params):
        params, state = tx.update_and_apply(grads, jax.tree.unflatten(structure, state_leaves), params)
        return params, jax.tree.leaves(state)

    with set_mesh(mesh):
        state, structure = jax.tree.flatten(tx.init(params))
        state = [leaf if leaf.ndim else jax.device_put(leaf, NamedSharding(mesh, P())) for leaf in state]
        step = jax.jit(of_leaves)
        exported = jax.export.export(step, platforms=["cpu", "cuda", "tpu"])(params, state, params)
        again = jax.export.deserialize(exported.serialize())
        assert again.nr_devices == 8
        for grads in params, bad:
            found, expected = again.call(grads, state, params), step(grads, state, params)
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
            assert jax.tree.unflatten(structure, found[1]).skipped_steps == (grads is bad)


def lines_of_cached(folder):
    errors = folder / "stderr"
    with started("cached.py", folder / "cache", devices=8, errors=errors, stdout=PIPE) as process:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, errors.read_text()
    return output.splitlines()


@pytest.mark.slow
def test_the_next_process_finds_the_compiled_steps_in_the_cache(tmp_path):
    assert lines_of_cached(tmp_path) == [f"{name}, 0, 1" for name in cached.MESHES]
    assert lines_of_cached(tmp_path) == [f"{name}, 1, 0" for name in cached.MESHES]
