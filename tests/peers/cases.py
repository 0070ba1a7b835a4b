"""Helper functions that convert observed behavior to the words of the table in `docs/migrating.md`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

PERIOD = 5  # A scale should grow after this number of finite steps.
HIGHEST_POWER = 2.0**127  # This is the largest power of two in float32.


def growth(scales):
    """Return whether the scale grows after N or N + 1 finite steps. ``scales`` are the scales after each step."""
    changes = np.flatnonzero(np.diff(scales)) + 1
    assert len(changes) >= 2
    late = {int(n) for n in np.diff(changes)}
    assert late <= {PERIOD, PERIOD + 1}
    return "N" if late == {PERIOD} else "N + 1"


def number(scale):
    """Return the scale in the notation of the table."""
    scale = float(scale)
    if np.isinf(scale):
        return "infinity"
    return "2^127" if scale == HIGHEST_POWER else f"{scale:.2g}"


def unscaled(eager, jitted):
    """Describe the result of unscaling ones at a scale of 2^127, eagerly and under `jax.jit`."""
    outcomes = {
        (1.0, 1.0): "exact",
        (0.0, 0.0): "zeros",
        (0.0, 1.0): "zeros outside `jit`",
        (1.0, 0.0): "zeros in `jit`",
    }
    (outcome,) = set(zip(np.asarray(eager).tolist(), np.asarray(jitted).tolist(), strict=True))
    return outcomes[outcome]


def compilations(jit, step, state):
    """Return how often ``step`` is traced in four calls of ``state = step(state)``."""
    traces = []

    @jit
    def counted(state):
        traces.append(state)
        return step(state)

    for _ in range(4):
        state = counted(state)
    return str(len(traces))


def which_layer(states):
    """Return whether the states differ. Each state follows a step with a nonfinite gradient in another leaf."""
    return "none" if len({str(state) for state in states}) == 1 else "told"


def hysteresis(scales):
    """Return whether the scale has hysteresis. ``scales`` are the scales before and after three nonfinite steps."""
    return "none" if all(after < before for before, after in itertools.pairwise(scales)) else "has one"


def on_four_devices(step, in_specs, **options):
    """Return the compiled `jax.shard_map` of ``step`` over the axis "x". All results are sharded."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=P("x"), **options))


def schedule(select):
    """Check that a schedule advances on a nonfinite step unless ``select(new, old)`` selects its old state."""
    params, inner = jnp.float32(1.0), optax.sgd(optax.piecewise_constant_schedule(1.0, {1: 0.5}))
    state = inner.init(params)
    _, advanced = inner.update(jnp.float32(jnp.inf), state)
    assert [inner.update(params, state)[0] for state in (advanced, select(advanced, state))] == [-0.5, -1.0]
    return "advances unless you select its state"
