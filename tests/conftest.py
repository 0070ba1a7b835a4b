"""Strict settings for the whole suite, eight host devices and no silent broadcasting of ranks, and a shared fixture."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """What one module compiled, another seldom needs; kept for the whole run it takes gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture
def compilations():
    """A list that grows by one entry with every program compiled."""
    programs = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield programs
    jax.monitoring.clear_event_listeners()
