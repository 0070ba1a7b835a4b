"""Steps that are called outside `jax.jit`: one compiled call each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np

_Method = TypeVar("_Method", bound=Callable[..., Any])


def compiled_when_eager(method: _Method) -> _Method:
    """A method that is one dispatch where all its arguments are concrete arrays, and inlined under a user's `jax.jit`.

    Called eagerly, a branch would be compiled anew at every call. Arguments that the method does not name stay what
    they are, since they may be functions, or numbers and flags that steer Python code: with one of those, a call is as
    many dispatches as the method has operations.
    """
    jitted = jax.jit(method, static_argnums=0)
    own_names = inspect.signature(method).parameters.keys()

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_eager = kwargs.keys() <= own_names and all(map(_is_concrete_array, jax.tree.leaves((args, kwargs))))
        return (jitted if is_eager else method)(self, *args, **kwargs)

    return cast(_Method, call)


def _is_concrete_array(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype != jax.dtypes.float0
    return isinstance(leaf, (jax.Array, bool, int, float, complex)) and not isinstance(leaf, jax.core.Tracer)
