"""Draw three figures of the documentation: ``python docs/figures.py``. The script needs the extras demo and plot.

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


def predictions() -> list[tuple[str, float, float]]:
    """Return the name, the run time and the temporary memory of each training step in `performance.md`."""
    section = (FOLDER / "performance.md").read_text().split("\n## ")[1]
    # Leave out the table of the models that were not used for tuning.
    section = section.split("\n### ")[0]
    rows = [
        line.strip("|").split("|")
        for line in section.splitlines()
        if line.startswith("| ")
    ]
    return [
        (row[0].strip(), float(row[1]), float(row[3])) for row in rows[1:]
    ]


def models() -> Figure:
    """Return a bar chart of the estimated run time and the temporary memory relative to float32."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    ax = figure.subplots()
    names, times, memory = zip(*predictions(), strict=True)
    positions = np.arange(len(names))
    ax.barh(
        positions - 0.2,
        times,
        0.4,
        label="run time (estimated)",
        color="tab:blue",
    )
    ax.barh(
        positions + 0.2,
        memory,
        0.4,
        label="temporary memory",
        color="tab:orange",
    )
    ax.axvline(1, color="black", linewidth=1, linestyle="--")
    ax.set_yticks(positions, names)
    ax.invert_yaxis()
    ax.set_xlabel("relative to float32 (compiled for an H100, not timed)")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    return figure


def main() -> None:
    """Train the network, and draw the figures."""
    models().savefig(FOLDER / "models.png", dpi=DOTS_PER_INCH)
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
