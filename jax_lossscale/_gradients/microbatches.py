"""A batch among the arguments of a function, made into micro-batches; and what may be wrong with the choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_lossscale import _tree
from jax_lossscale._check import Argnums


def as_tuple(argnums: Argnums) -> tuple[int, ...]:
    return argnums if isinstance(argnums, tuple) else (argnums,)


def check_argnums(argnums: Argnums, batch_argnums: Argnums, num_args: int) -> None:
    """Raise a `ValueError` unless both name arguments that were given, and no argument in common."""
    for name, given, cure in (
        ("argnums", argnums, "Pass what is differentiated by position."),
        ("batch_argnums", batch_argnums, "Pass the batch by position."),
    ):
        missing = [argnum for argnum in as_tuple(given) if not -num_args <= argnum < num_args]
        if missing:
            raise ValueError(
                f"`accumulate_gradients({name}={given})` names arguments that were not given: the function was called "
                f"with {num_args} positional arguments. {cure}"
            )
    if _positions(argnums, num_args) & _positions(batch_argnums, num_args):
        raise ValueError(
            f"`accumulate_gradients(argnums={argnums}, batch_argnums={batch_argnums})` have arguments in common. "
            "The gradients of a batch that is split cannot be added up: use `value_and_scaled_grad`."
        )


def split(args: tuple[Any, ...], batch_argnums: Argnums, num_microbatches: int) -> tuple[Any, ...]:
    """The batch, each leaf with a new first axis: that of the micro-batches."""
    batch = tuple(args[argnum] for argnum in as_tuple(batch_argnums))
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            "`accumulate_gradients` needs a batch of arrays with the same number of examples along their first axes, "
            f"got {jax.tree.map(jnp.shape, batch)}. Choose the batch among the arguments with `batch_argnums`."
        )
    ((size,),) = sizes
    if size % num_microbatches or size == 0:
        raise ValueError(
            f"`accumulate_gradients(num_microbatches={num_microbatches})` must divide the {size} examples of the batch "
            "evenly. Drop the last few, or draw as many more."
        )

    def split_leaf(leaf: Any) -> jax.Array:
        by_example = jnp.reshape(leaf, (size // num_microbatches, num_microbatches, *jnp.shape(leaf)[1:]))
        return jnp.swapaxes(by_example, 0, 1)

    return jax.tree.map(split_leaf, batch)


def left_whole(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    argnums: Argnums,
    batch_argnums: Argnums,
    microbatches: tuple[Any, ...],
) -> str | None:
    """A sentence about arguments that look like parts of the batch and are not split; ``None`` if there are none.

    All their arrays are as long as the batch. That may be chance (as many channels as examples), and so is no error
    by itself.
    """
    num_microbatches, microbatch_size = jnp.shape(jax.tree.leaves(microbatches)[0])[:2]
    size = num_microbatches * microbatch_size
    taken = _positions(argnums, len(args)) | _positions(batch_argnums, len(args))

    def is_as_long(argument: Any) -> bool:
        lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(argument) if _tree.is_array(leaf)}
        return lengths == {(size,)}

    def suspects() -> Iterator[str]:
        yield from (f"argument {n}" for n, given in enumerate(args) if n not in taken and is_as_long(given))
        yield from (f"`{name}=`" for name, given in kwargs.items() if is_as_long(given))

    found = ", ".join(suspects()) if num_microbatches > 1 else ""
    if not found:
        return None
    return (
        f"`accumulate_gradients(batch_argnums={batch_argnums})` makes micro-batches of {microbatch_size} of the {size} "
        f"examples, and leaves {found} whole, {size} along the first axis. What belongs to the batch must be among "
        "`batch_argnums`, by position."
    )


def _positions(argnums: Argnums, num_args: int) -> set[int]:
    return {argnum % num_args for argnum in as_tuple(argnums)}
