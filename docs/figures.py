"""Draw two figures of the documentation: ``python docs/figures.py``. The script needs the extras demo and plot.

The demo and the benchmarks draw the other figures.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

import jax_lossscale as jls
from jax_lossscale.demo import job

FOLDER = Path(__file__).parent
STEPS = 300
DOTS_PER_INCH = 150


def trained_params(patches: jax.Array) -> job.Params:
    """Return the parameters of the network of the demo after some training steps in float32."""
    optimizer = job.make_optimizer(STEPS)
    params = job.init_params(jax.random.key(0), patches)

    def step(
        carry: tuple[job.Params, optax.OptState], _: None
    ) -> tuple[tuple[job.Params, optax.OptState], None]:
        params, state = carry
        updates, state = optimizer.update(
            jax.grad(job.loss_fn)(params, patches), state, params
        )
        return (optax.apply_updates(params, updates), state), None

    return jax.jit(lambda carry: jax.lax.scan(step, carry, length=STEPS)[0])(
        (params, optimizer.init(params))
    )[0]


def history(result: job.TrainingRun) -> dict[str, np.ndarray]:
    """Return the history that `plot_run` draws: the loss, the scale after the step, and whether it was skipped."""
    trace = result.trace
    return {
        "loss": trace.loss,
        "loss_scale": trace.loss_scale,
        "skipped": np.diff(trace.skipped_steps, prepend=0) > 0,
    }


def main() -> None:
    """Train the network, and draw the figures."""
    patches = job.load_patches()
    grads = jax.grad(job.loss_fn)(trained_params(patches), patches)
    dtype, loss_scale = job.arms()["float16_dynamic"]
    result = job.train(
        patches,
        dtype,
        loss_scale,
        steps=STEPS,
        seed=0,
        description="Training",
    )

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    suggestion = jls.diagnostics.suggest_loss_scale(grads)
    jls.plotting.plot_exponents(
        grads, suggestion.loss_scale, ax=figure.subplots()
    )
    figure.savefig(FOLDER / "exponents.png", dpi=DOTS_PER_INCH)

    jls.plotting.plot_run(history(result))[0].figure.savefig(
        FOLDER / "run.png", dpi=DOTS_PER_INCH
    )


if __name__ == "__main__":
    main()
