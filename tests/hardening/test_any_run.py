"""Any run at all: steps and faults, checkpoints and restores, other kinds of loss scale put in on the way.

Hypothesis drives a run and, beside it, a plain account of what it should be; after each rule the two are compared.
"""

import copy
import dataclasses
import pickle

import flax.serialization
import jax
import numpy as np
import orbax.checkpoint
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from runs import (
    KINDS,
    MOMENTUM,
    PARAMS,
    arguments_of,
    assert_same_bits,
    assert_scale_is_sound,
    by_update,
    dynamic_step,
    events,
    inputs_of,
    momentum_step,
    verdict_of,
)

import jax_lossscale as jls

TX = jls.loss_scaled(MOMENTUM)
BEGINNINGS = {name: jls.loss_scaled(MOMENTUM, kind).init({**PARAMS, "frozen": None}) for name, kind in KINDS.items()}
# Without the kind that shows bfloat16 to the chain as it is.
kinds = st.sampled_from(["fixed_skipping", "dynamic_full", "auto", "users_own"])


@dataclasses.dataclass
class Account:
    """What a run should be."""

    params: dict
    trace: dict
    applied: int = 0
    skipped: int = 0
    in_a_row: int = 0


class AnyRun(RuleBasedStateMachine):
    formats = ("pickle", "flax")

    @initialize(name=kinds)
    def begin(self, name):
        self.params, self.state = PARAMS, BEGINNINGS[name]
        self.account = Account(
            *jax.device_get(({k: v for k, v in PARAMS.items() if k != "frozen"}, self.state.inner_state[0].trace))
        )
        self.saved = None

    @rule(event=events, seed=st.integers(0, 2**32 - 1), fused=st.booleans())
    def step(self, event, seed, fused):
        inputs = inputs_of(event, np.random.default_rng(seed))
        before = self.state
        grads, told = arguments_of(inputs)
        take = TX.update_and_apply if fused else lambda *args, **told: by_update(TX, *args, **told)
        self.params, self.state = take(grads, before, self.params, **told)
        self.note(inputs, before.loss_scale, self.state.loss_scale)

    def note(self, inputs, before, after):
        """Enter a step in the account, and look at what it made of the loss scale."""
        account, scale = self.account, float(before())
        verdict = verdict_of(before, scale, inputs)
        assert bool(self.state.grads_finite) == verdict.grads_finite
        if verdict.applied:
            account.params, account.trace = momentum_step(account.params, account.trace, inputs["grads"], scale)
        account.applied += verdict.applied
        account.skipped += not verdict.applied
        account.in_a_row = 0 if verdict.applied else account.in_a_row + 1
        if not verdict.reacts:
            assert_same_bits(after, before)
        elif isinstance(before, jls.DynamicLossScale):
            moved = dynamic_step(
                before, scale, int(before.num_good_steps), before.hysteresis_left, verdict.grads_finite
            )
            assert (float(after()), after.num_good_steps, after.hysteresis_left) == moved
        elif isinstance(before, jls.AutoLossScale) and not verdict.grads_finite:
            assert float(after()) <= scale

    @rule(exponent=st.integers(-4, 16))
    def set_the_scale_by_hand(self, exponent):
        loss_scale = self.state.loss_scale
        if hasattr(loss_scale, "current_loss_scale"):
            ceiling = loss_scale.max_loss_scale or 2.0**127
            by_hand = min(max(2.0**exponent, loss_scale.min_loss_scale), ceiling)
            loss_scale = dataclasses.replace(loss_scale, current_loss_scale=by_hand)
            self.state = self.state._replace(loss_scale=loss_scale)

    @rule(name=kinds)
    def put_another_kind_in(self, name):
        self.state = self.state._replace(loss_scale=KINDS[name])

    @rule(data=st.data())
    def save(self, data):
        run = {"params": self.params, "state": self.state}
        self.saved = data.draw(st.sampled_from(self.formats)), run, copy.deepcopy(self.account)
        self.written = self.write(self.saved[0], run)

    def write(self, format_, run):
        return pickle.dumps(run) if format_ == "pickle" else flax.serialization.to_bytes(run)

    def read(self, format_, target):
        if format_ == "pickle":
            return pickle.loads(self.written)
        return flax.serialization.from_bytes(target, self.written)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restore(self):
        """Onto a run of the same kind that has just begun, as after the process was killed."""
        format_, run, account = self.saved
        target = jax.tree.map(np.zeros_like, run)
        restored = self.read(format_, target)
        assert_same_bits(restored, run)
        self.params, self.state, self.account = restored["params"], restored["state"], copy.deepcopy(account)

    @invariant()
    def the_run_is_as_it_should_be(self):
        if not hasattr(self, "account"):
            return
        state, account = self.state, self.account
        assert_same_bits({k: v for k, v in self.params.items() if k != "frozen"}, account.params)
        assert_same_bits(state.inner_state[0].trace, account.trace)
        assert_scale_is_sound(state.loss_scale)
        counts = (state.applied_steps, state.skipped_steps, state.consecutive_skips)
        assert counts == (account.applied, account.skipped, account.in_a_row)


def test_any_run():
    few = settings(max_examples=15, stateful_step_count=25, deadline=None, derandomize=True)
    run_state_machine_as_test(AnyRun, settings=few)


class AnyRunWithOrbax(AnyRun):
    formats = ("pickle", "flax", "orbax")

    def write(self, format_, run):
        if format_ != "orbax":
            return super().write(format_, run)
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(self.folder / "run", run, force=True)
        return None

    def read(self, format_, target):
        if format_ != "orbax":
            return super().read(format_, target)
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(self.folder / "run", target)


@pytest.mark.slow
def test_any_run_and_many_of_them(tmp_path):
    AnyRunWithOrbax.folder = tmp_path
    many = settings(max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(AnyRunWithOrbax, settings=many)
