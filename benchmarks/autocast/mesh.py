"""A loss whose weights are shared by the devices of a mesh, and what these send one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from benchmarks.autocast.counting import equations
from benchmarks.autocast.models import Casts, Model
from benchmarks.peers import Loss

DEVICES = 8
_COLLECTIVES = ("all_gather", "reduce_scatter")


class Sent(NamedTuple):
    """What collectives of a program take, on each device."""

    narrow: int  # collectives of 16 bits
    total: int
    bytes: int


def sharded(model: Model) -> Model:
    """Each weight is gathered where it is used, so its gradient is scattered; the batch is divided, too."""

    def loss(casts: Casts) -> Loss:
        def of_all(params: Any, batch: Any) -> jax.Array:
            def of_one(params: Any, batch: Any) -> jax.Array:
                return jax.lax.pmean(model.loss(casts)(_weights(_gather, params), batch), "data")

            specs = _weights(lambda _: P("data"), jax.tree.map(lambda _: P(), params))
            mesh = AbstractMesh((DEVICES,), ("data",))
            return jax.shard_map(of_one, mesh=mesh, in_specs=(specs, P("data")), out_specs=P())(params, batch)

        return of_all

    return model._replace(loss=loss)


def sent(loss: Loss, params: Any, batch: Any) -> Sent:
    """By all devices to all, for value and gradients."""
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(params, batch).jaxpr
    types = [eqn.invars[0].aval for eqn in equations(jaxpr) if eqn.primitive.name.startswith(_COLLECTIVES)]
    are_narrow = [aval.dtype in (jnp.float16, jnp.bfloat16) for aval in types]
    return Sent(sum(are_narrow), len(types), sum(aval.size * aval.dtype.itemsize for aval in types))


def _gather(weight: jax.Array) -> jax.Array:
    return jax.lax.all_gather(weight, "data", axis=0, tiled=True)


def _weights(function: Callable[[Any], Any], params: Any) -> Any:
    """The parameters, with a function of each matrix in its place."""

    def of_leaf(path: Any, leaf: Any) -> Any:
        return function(leaf) if path[-1].key == "kernel" else leaf

    return jax.tree_util.tree_map_with_path(of_leaf, params)
