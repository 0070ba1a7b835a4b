"""Compatibility functions for tests, for every version of JAX and optax that `pyproject.toml` allows.

The package has its own functions in `jax_lossscale/_compat.py`. The two files are separate, so that neither hides names
that the other one lacks.
"""

import jax
import optax
import pytest

FLOAT8S = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


def as_numbers(version):
    return tuple(int(part) for part in version.split(".")[:3])


def is_older_than(version):
    return as_numbers(jax.__version__) < as_numbers(version)


def needs_jax(version, reason):
    """Return a mark that skips a test or parameter with older versions of JAX. The reason describes their behavior."""
    return pytest.mark.skipif(is_older_than(version), reason=f"before jax {version}: {reason}")


def needs_optax(version, reason):
    """Return a mark that skips a test or parameter with older versions of optax."""
    is_older = as_numbers(optax.__version__) < as_numbers(version)
    return pytest.mark.skipif(is_older, reason=f"before optax {version}: {reason}")


def skip_before(version, reason):
    """Skip the running test with older versions of JAX."""
    if is_older_than(version):
        pytest.skip(f"before jax {version}: {reason}")


def enable_x64(enabled=True):
    if is_older_than("0.8.0"):
        from jax.experimental import enable_x64

        return enable_x64(enabled)
    return jax.enable_x64(enabled)


def pcast(x, axis_name, *, to):
    if is_older_than("0.8.2"):
        assert to == "varying"
        return jax.lax.pvary(x, axis_name)
    return jax.lax.pcast(x, axis_name, to=to)


def set_mesh(mesh):
    """Return a context manager that sets the mesh."""
    return jax.sharding.use_mesh(mesh) if is_older_than("0.7.1") else jax.set_mesh(mesh)
