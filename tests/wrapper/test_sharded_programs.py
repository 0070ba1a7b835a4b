"""Collectives in the compiled optimizer step on a mesh."""

import re
from collections import Counter

import jax
import jax.export
import numpy as np
import optax
import pytest
from any_jax import set_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

pytestmark = [pytest.mark.ci, pytest.mark.as_for_users]

COLLECTIVES = r"\s(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
MESH = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
TX = jls.loss_scaled(optax.sgd(0.1), jls.DynamicLossScale(8.0))
SELECTING = jls.loss_scaled(optax.adam(0.1), jls.DynamicLossScale(8.0), skip="select")
MEASURING = jls.loss_scaled(optax.sgd(0.1), jls.AutoLossScale(8.0))
PROGRAMS = {
    "all_finite": (TX, lambda grads, state, params: jls.all_finite(grads)),
    "update": (TX, TX.update),
    "update_and_apply": (TX, TX.update_and_apply),
    "update_and_apply, selecting": (SELECTING, SELECTING.update_and_apply),
    "update_and_apply, measuring": (MEASURING, MEASURING.update_and_apply),
}
# The entries are the mesh shape, the specs of the leaves and the number of all-reduces with automatic axes. With
# automatic axes, XLA for CPUs creates one all-reduce for each sharded dimension. XLA for GPUs combines the all-reduces
# of one leaf, which `python -m benchmarks cuda` checks.
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
# A device reads leaves of the first shape separately, and leaves of the second shape in a block.
SHAPES = ((16, 512, 8), (8, 16, 8))


def mesh_of(shape, axis_type):
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(axis_type,) * len(shape))


def leaves_on(mesh, specs, number):
    shapes = [SHAPES[n // len(specs) % len(SHAPES)] for n in range(number)]
    return [
        jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, specs[n % len(specs)]))
        for n, shape in enumerate(shapes)
    ]


CASES = [(split, "all_finite") for split in SPLITS] + [("one axis", program) for program in tuple(PROGRAMS)[1:-1]]
CASES = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
CASES += [("one axis, not all leaves", "update_and_apply, measuring")]
CASES += [("two axes, split in all ways", "update_and_apply, selecting")]


@pytest.mark.parametrize("axis_type", MESH)
@pytest.mark.parametrize(("split", "program"), CASES)
def test_number_of_scalar_all_reduces_does_not_depend_on_the_number_of_leaves(split, axis_type, program):
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
            assert "custom_call" not in lowered.as_text()  # A Python callback would be a custom call.
