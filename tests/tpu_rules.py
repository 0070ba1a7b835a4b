"""Apply the rules of `autocast` for TPUs on a CPU. To run tests with them: ``python -m pytest -p tests.tpu_rules``.

Seven tests then fail: those in `test_tpu.py` and `test_lowering.py` that compare programs for several platforms, which
are now the same, and those in `test_resume.py` and `test_processes.py` that compare the bits of this process with those
of other processes, to which the rules do not apply.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock


def _on_tpu(*args, default=None, tpu=None, **others):
    """Replace `jax.lax.platform_dependent`."""
    return (tpu or default)(*args)


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Lower programs for a CPU as for a TPU."""
    # `conftest.py` must set the options of JAX before JAX is imported.
    import jax
    from jax.interpreters import mlir

    from jax_lossscale._autocast import marks

    rules = {
        primitive: entry
        for primitive, entry in mlir._platform_specific_lowerings["tpu"].items()
        if primitive is marks._unfused or getattr(entry.rule, "func", entry.rule).__module__.startswith("jax_lossscale")
    }
    assert len(rules) == 3  # the barriers of rounded cotangents, of `jax.checkpoint` and of `unfused`
    with (
        mock.patch.object(jax.lax, "platform_dependent", _on_tpu),
        mock.patch.dict(mlir._platform_specific_lowerings["cpu"], rules),
    ):
        jax.clear_caches()
        yield
    jax.clear_caches()


def pytest_sessionstart(session):
    """Apply the rules to all tests, if pytest loads this file as a plugin."""
    rules = forced()
    rules.__enter__()
    session.config.add_cleanup(lambda: rules.__exit__(None, None, None))
