"""Strict settings for the whole test suite, and common fixtures."""

import gc
import os
import re
from pathlib import Path

# Most of the time is spent on compilation. The persistent cache shares compiled programs between runs, workers and
# child processes.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Most programs run only once, so optimizations do not pay off. The weekly CI job sets this variable to 0.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads this variable when it is imported.
# Some tests need eight devices, and others the rounding of a CPU, even if JAX is installed for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# The variable `pytestmark` at the top of a file applies to all tests of the file.
OF_ALL = re.compile(r"^pytestmark = (.*)", re.MULTILINE)


def pytest_configure(config):
    """If the command line names a path and no markers, run all tests of this path.

    By default, `addopts` in `pyproject.toml` excludes slow tests.
    """
    arguments = config.invocation_params.args
    names_a_path = any(Path(str(argument).partition("::")[0]).exists() for argument in arguments)
    has_markers = any(str(argument).startswith(("-m", "--markexpr")) for argument in arguments)
    if names_a_path and not has_markers:
        config.option.markexpr = ""


def pytest_ignore_collect(collection_path, config):
    """Ignore a file whose tests are all excluded by their markers, which is faster than importing the file."""
    if not collection_path.match("test_*.py"):
        return None
    text, expression = collection_path.read_text(), config.option.markexpr
    if " or " in expression:
        return None
    of_all = OF_ALL.search(text)
    unwanted = [mark for mark in re.findall(r"not (\w+)", expression) if of_all and f"pytest.mark.{mark}" in of_all[1]]
    return True if unwanted or (expression.startswith("ci and") and "mark.ci" not in text) else None


def pytest_collection_finish():
    """Exclude all imported objects from garbage collection, which otherwise took a quarter of the time.

    The other objects are mostly expressions of traced programs, few of which are garbage at any time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs(request):
    """Set the optimization level for a module, and clear the caches of JAX afterwards to save memory."""
    unoptimized = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    as_for_users = request.node.get_closest_marker("as_for_users")
    jax.config.update("jax_disable_most_optimizations", unoptimized and not as_for_users)
    yield
    jax.clear_caches()


@pytest.fixture
def compilations():
    """Return a list that receives one entry for each compiled program."""
    programs = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield programs
    jax.monitoring.clear_event_listeners()
