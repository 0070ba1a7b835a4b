"""Compilation of many training steps before the first step is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax

from benchmarks.harness.timing import Repeated

# Tracing is sequential, but XLA compiles several programs at the same time.
_NUM_THREADS = 8


def compile_all(steps: Mapping[str, Callable[[], tuple[Any, Any]]], patience: float) -> dict[str, tuple[Any, Any]]:
    """Compile training steps in threads.

    Args:
      steps: for each name, a function that returns a jitted step and a function that returns its arguments.
      patience: the number of seconds after which the function returns, even if some steps are not compiled yet.

    Returns:
      The compiled steps that are ready, each with its arguments in the memory of the host.
    """
    pool = ThreadPoolExecutor(_NUM_THREADS)
    futures = {name: pool.submit(_compiled, make) for name, make in steps.items()}
    wait(futures.values(), patience)
    pool.shutdown(wait=False, cancel_futures=True)
    ready = {name: future for name, future in futures.items() if future.done() and not future.cancelled()}
    return {name: future.result() for name, future in ready.items()}


def repeated(compiled: tuple[Any, Any]) -> Repeated:
    """Return a `Repeated` of a compiled step and its arguments. The first argument is the state of the training."""
    program, arguments = compiled
    return Repeated(program, *jax.device_put(arguments))


def _compiled(make: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    step, begin = make()
    program = step.lower(*jax.eval_shape(begin)).compile()
    # The initialization is compiled for the CPU, because XLA takes much longer to compile it for a GPU.
    with jax.default_device(jax.devices("cpu")[0]):
        return program, jax.device_get(jax.jit(begin)())
