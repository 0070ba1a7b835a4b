"""Compilation of many training steps before the first step is timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import Any

import jax

from benchmarks.harness.timing import Repeated

# These options save most of the compile time on a GPU, because XLA otherwise tries several versions of each matmul.
WITHOUT_AUTOTUNING = MappingProxyType({"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0})


def compile_all(
    steps: Mapping[str, Callable[[], tuple[Any, Any]]], patience: float, options: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, Any]]:
    """Compile training steps in threads. Tracing is sequential, but XLA compiles several programs at the same time.

    Args:
      steps: for each name, a function that returns a jitted step and a function that returns its arguments.
      patience: the number of seconds after which the function returns, even if some steps are not compiled yet.
      options: the compiler options of XLA. By default, XLA's default options are used.

    Returns:
      The compiled steps that are ready, each with its arguments in the memory of the host.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    futures = {name: pool.submit(_compiled, make, options) for name, make in steps.items()}
    wait(futures.values(), patience)
    pool.shutdown(wait=False, cancel_futures=True)
    ready = {name: future for name, future in futures.items() if future.done() and not future.cancelled()}
    return {name: future.result() for name, future in ready.items()}


def repeated(compiled: tuple[Any, Any]) -> Repeated:
    """Return a `Repeated` of a compiled step and its arguments. The first argument is the state of the training."""
    program, arguments = compiled
    return Repeated(program, *jax.device_put(arguments))


def _compiled(make: Callable[[], tuple[Any, Any]], options: Mapping[str, Any] | None) -> tuple[Any, Any]:
    step, begin = make()
    program = step.lower(*jax.eval_shape(begin)).compile(options and dict(options))
    # The initialization is compiled for the CPU, because XLA takes much longer to compile it for a GPU.
    with jax.default_device(jax.devices("cpu")[0]):
        return program, jax.device_get(begin())
