"""The program of value and scaled gradients, which every question about a function begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_lossscale._check import as_argnums, check_flag, check_function
from jax_lossscale._gradients import value_and_scaled_grad
from jax_lossscale._program.jaxpr import Traced


def gradient_program(
    caller: str,
    fun: Callable[..., Any],
    scale: float,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> Traced:
    """Trace `value_and_scaled_grad`; the first input is the scale. An error names the argument of ``caller``."""
    check_function(fun, f"{caller}(fun=...)")
    check_flag(has_aux, f"{caller}(has_aux=...)")
    as_argnums(argnums, f"{caller}(argnums=...)")

    def scaled(scale: jax.Array, *args: Any, **kwargs: Any) -> Any:
        return value_and_scaled_grad(fun, scale, argnums, has_aux)(*args, **kwargs)

    traced = Traced(scaled, (jnp.float32(scale), *args), kwargs)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in traced.inputs):
        raise ValueError(f"`{caller}(*args)` got values that are traced. Call it outside of `jax.jit`.")
    return traced
