"""A run that is carried over goes on as it would have: the real classes beside ours, where they are installed.

In both directions, over the next hundred steps, with random verdicts. `test_golden_records.py` asks the same of what
the real classes were recorded to do, and needs none of them.
"""

import random
import warnings

import jax
import pytest
from originals import PEERS, ours

import jax_lossscale as jls

STEPS_BEFORE, STEPS_AFTER = 37, 100
# Of Keras, on NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
each_peer = pytest.mark.parametrize("name", PEERS)
adjust = jax.jit(jls.DynamicLossScale.adjust)


def run_both(peer, loss_scale, steps, seed):
    """The loss scale after ``steps`` with the same verdicts as the peer, which must agree on every one."""
    rng = random.Random(seed)
    for step in range(steps):
        finite = rng.random() < 0.8
        loss_scale = adjust(loss_scale, finite)
        assert peer.step(finite) == finite
        scale, counter = peer.scale_and_counter()
        assert (step, float(loss_scale()), int(loss_scale.num_good_steps)) == (step, scale, counter)
    return loss_scale


def carried(function, *arguments):
    """What a conversion gives, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*arguments)
    caught = [warning for warning in caught if issubclass(warning.category, UserWarning)]
    assert {warning.filename for warning in caught} <= {__file__}  # they point at the line that converts
    return result, [str(warning.message) for warning in caught]


@each_peer
@pytest.mark.parametrize("period", [2, 4, 9])
def test_a_run_of_a_peer_goes_on_here_and_back_there(name, period):
    module, peer, again = ours(name), PEERS[name](period=period), PEERS[name](initial=1.0, period=3)
    rng = random.Random(period)
    for _ in range(STEPS_BEFORE):
        peer.step(rng.random() < 0.8)
    loss_scale, lost = carried(getattr(module, f"from_{name}"), *peer.save())
    assert len(lost) == len(peer.losses)
    assert all(part in message for part, message in zip(peer.losses, lost, strict=True))
    assert float(loss_scale()) == peer.scale_and_counter()[0]
    loss_scale = run_both(peer, loss_scale, STEPS_AFTER, seed=period)

    saved, _ = carried(getattr(module, f"to_{name}"), loss_scale)
    again.load(*(saved if isinstance(saved, tuple) else (saved,)))
    assert again.scale_and_counter()[0] == peer.scale_and_counter()[0]
    run_both(again, loss_scale, STEPS_AFTER, seed=period + 100)


@each_peer
def test_a_fresh_peer_is_a_fresh_loss_scale(name):
    module, peer = ours(name), PEERS[name]()
    loss_scale, _ = carried(getattr(module, f"from_{name}"), *peer.save())
    assert (float(loss_scale()), int(loss_scale.num_good_steps), loss_scale.initial_loss_scale) == (8.0, 0, 8.0)
    run_both(peer, loss_scale, STEPS_AFTER, seed=0)


@pytest.mark.parametrize("name", ["torch", "flax"])
def test_factors_that_are_no_powers_of_two(name):
    """Within a unit in the last place for each change of the scale, of which there are at most as many as steps."""
    module, peer = ours(name), PEERS[name](initial=1000.0, period=3, multiplier=1.7, backoff=0.6)
    loss_scale, _ = carried(getattr(module, f"from_{name}"), *peer.save())
    rng = random.Random(0)
    for step in range(1, STEPS_AFTER + 1):
        finite = rng.random() < 0.8
        peer.step(finite)
        loss_scale = adjust(loss_scale, finite)
        assert float(loss_scale()) == pytest.approx(peer.scale_and_counter()[0], rel=step * 2.0**-23)
