"""Names of today's JAX that tests use, with every version of JAX and optax that `pyproject.toml` allows.

The package has its own (`jax_lossscale/_compat.py`); tests have theirs, so that neither hides what the other lacks.
"""

import jax
import optax
import pytest

# Reasons that several tests have for needing a newer JAX.
MORE_COLLECTIVES = "XLA does not join the all-reduces of the verdict, and may lay gradients out anew to read them"
NO_OUT_SHARDING = "`jnp.dot` takes no `out_sharding`"
NO_RESHAPE_OF_EXPLICIT = "no array of explicit sharding can be reshaped in its split dimension"
NO_GRAD_OF_WHAT_VARIES = "`jax.grad` inside `shard_map` takes no value that varies, unless `check_rep` is off"


def as_numbers(version):
    return tuple(int(part) for part in version.split(".")[:3])


def is_older_than(version):
    return as_numbers(jax.__version__) < as_numbers(version)


def needs_jax(version, reason):
    """Skip a test, or a parameter of one, with an older JAX, of which the reason says what it does otherwise."""
    return pytest.mark.skipif(is_older_than(version), reason=f"before jax {version}: {reason}")


def needs_optax(version, reason):
    """`needs_jax`, for optax."""
    is_older = as_numbers(optax.__version__) < as_numbers(version)
    return pytest.mark.skipif(is_older, reason=f"before optax {version}: {reason}")


NO_LINEN_RNN = needs_jax("0.7.0", "the newest flax that goes with it cannot initialize `nn.RNN`")


def skip_before(version, reason):
    """`needs_jax`, for what is known inside a test only."""
    if is_older_than(version):
        pytest.skip(f"before jax {version}: {reason}")


def enable_x64(enabled=True):
    if is_older_than("0.8.0"):
        from jax.experimental import enable_x64

        return enable_x64(enabled)
    return jax.enable_x64(enabled)


def pcast(x, axis_name, *, to):
    if is_older_than("0.8.0"):
        assert to == "varying"
        return jax.lax.pvary(x, axis_name)
    return jax.lax.pcast(x, axis_name, to=to)


def reshard(x, sharding):
    if is_older_than("0.7.0"):
        from jax.experimental.shard import reshard

        return reshard(x, sharding)
    return jax.sharding.reshard(x, sharding)


def set_mesh(mesh):
    """As a context."""
    return jax.sharding.use_mesh(mesh) if is_older_than("0.7.0") else jax.set_mesh(mesh)


def shard_map(function, *, mesh=None, axis_names=frozenset(), check_vma=True, **specs):
    if not is_older_than("0.6.1"):
        return jax.shard_map(function, mesh=mesh, axis_names=axis_names, check_vma=check_vma, **specs)
    from jax.experimental.shard_map import shard_map

    mesh = mesh or jax.sharding.get_abstract_mesh()
    automatic = frozenset(mesh.axis_names) - frozenset(axis_names) if axis_names else frozenset()
    return shard_map(function, mesh=mesh, check_rep=check_vma, auto=automatic, **specs)
