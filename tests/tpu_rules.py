"""Apply the rules of `autocast` for TPUs on a CPU. To run tests with them: ``python -m pytest -p tests.tpu_rules``."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
from jax.interpreters import mlir


def _on_tpu(*args, default=None, tpu=None, **others):
    """Replace `jax.lax.platform_dependent`."""
    return (tpu or default)(*args)


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Lower programs for a CPU as for a TPU, inside a ``with`` statement or in a process that never leaves it."""
    rules = {
        primitive: entry
        for primitive, entry in mlir._platform_specific_lowerings["tpu"].items()
        if getattr(entry.rule, "func", entry.rule).__module__.startswith("jax_lossscale")
    }
    assert len(rules) == 2  # the barriers of rounded cotangents and of `jax.checkpoint`
    with (
        mock.patch.object(jax.lax, "platform_dependent", _on_tpu),
        mock.patch.dict(mlir._platform_specific_lowerings["cpu"], rules),
    ):
        jax.clear_caches()
        yield
    jax.clear_caches()


def pytest_configure():
    """Start to apply the rules when pytest loads this file as a plugin."""
    import jax_lossscale  # noqa: F401

    forced().__enter__()
