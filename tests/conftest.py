"""Strict settings for the whole suite, and shared fixtures."""

import gc
import os
import re
from pathlib import Path

# What one run, worker or child process compiled, the others find: most of the time is spent compiling.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# And nearly all of it runs once. Once a week CI sets this to 0.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("KERAS_BACKEND", "jax")  # which Keras reads when it is imported
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# What is asked of all tests of a file, on one line at its top.
OF_ALL = re.compile(r"^pytestmark = (.*)", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """Import no file whose tests are all left out by their markers: that takes longer than to read its text."""
    if not collection_path.match("test_*.py"):
        return None
    text, expression = collection_path.read_text(), config.option.markexpr
    of_all = OF_ALL.search(text)
    unwanted = [mark for mark in re.findall(r"not (\w+)", expression) if of_all and f"pytest.mark.{mark}" in of_all[1]]
    return True if unwanted or (expression.startswith("ci and") and "mark.ci" not in text) else None


def pytest_collection_finish():
    """What was imported stays until the end: a quarter of the time went to looking through it for garbage."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def compiled_programs(request):
    """Forget what a module compiled: another seldom needs it, and kept for the whole run it takes gigabytes."""
    unoptimized = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    as_for_users = request.node.get_closest_marker("as_for_users")
    jax.config.update("jax_disable_most_optimizations", unoptimized and not as_for_users)
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
