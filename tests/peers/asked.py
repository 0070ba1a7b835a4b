"""The situations that all libraries are put into, and the words for what came of it."""

import itertools

import numpy as np

PERIOD = 5  # good steps, after which a scale shall grow
HIGHEST_POWER = 2.0**127  # the largest power of two in float32


def growth(scales):
    """``scales``: after each of many good steps."""
    changes = np.flatnonzero(np.diff(scales)) + 1
    assert len(changes) >= 2
    late = {int(n) for n in np.diff(changes)}
    assert late <= {PERIOD, PERIOD + 1}
    return "N" if late == {PERIOD} else "N + 1"


def number(scale):
    """A scale, as the table writes it."""
    scale = float(scale)
    if np.isinf(scale):
        return "infinity"
    return "2^127" if scale == HIGHEST_POWER else f"{scale:.2g}"


def unscaled(eager, jitted):
    """What unscaling makes of ones that were scaled at a scale of 2^127: vectors."""
    outcomes = {
        (1.0, 1.0): "exact",
        (0.0, 0.0): "zeros",
        (0.0, 1.0): "zeros outside `jit`",
        (1.0, 0.0): "zeros in `jit`",
    }
    (outcome,) = set(zip(np.asarray(eager).tolist(), np.asarray(jitted).tolist(), strict=True))
    return outcomes[outcome]


def compilations(jit, step, state):
    """How often ``step`` is traced, and so compiled, while ``state = step(state)`` runs."""
    traces = []

    @jit
    def counted(state):
        traces.append(state)
        return step(state)

    for _ in range(4):
        state = counted(state)
    return str(len(traces))


def which_layer(states):
    """``states``: what is kept after a bad step, by the leaf that went bad."""
    return "none" if len({str(state) for state in states}) == 1 else "told"


def hysteresis(scales):
    """``scales``: before, and after each of three bad steps."""
    return "none" if all(after < before for before, after in itertools.pairwise(scales)) else "has one"
