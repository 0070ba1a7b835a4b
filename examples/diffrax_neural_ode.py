"""A neural differential equation in diffrax, trained in float16.

A network learns the equation of motion of a pendulum from trajectories. The network is the vector field of a
differential equation, which diffrax solves with adaptive steps. The model and the loss are written in float32, and
`jls.autocast` is applied to the network. The matrix multiplications of the network are computed in ``--dtype``, in the
forward and the backward pass. The solver stays in float32, because its small matrix multiplications must be accurate.
"""

from typing import Any

import command_line
import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

import jax_lossscale as jls
from jax_lossscale.interop.equinox import filter_value_and_scaled_grad

BATCH_SIZE, TRAIN_EXAMPLES, TEST_EXAMPLES = 32, 192, 64
TIMES = jnp.linspace(0.0, 2.0, 21)


def pendulum(t: Any, y: jax.Array, args: Any) -> jax.Array:
    """Return the time derivatives of the true angle and velocity, ``[2]``."""
    del t, args
    angle, velocity = y
    return jnp.stack([velocity, -4 * jnp.sin(angle) - 0.2 * velocity])


class Law(eqx.Module):
    """A network that computes the time derivatives of angle and velocity."""

    mlp: eqx.nn.MLP
    dtype: Any = eqx.field(static=True)

    def __init__(self, key: jax.Array, dtype: Any) -> None:
        self.mlp = eqx.nn.MLP(2, 2, 64, 2, activation=jax.nn.softplus, key=key)
        self.dtype = dtype

    def __call__(self, t: Any, y: jax.Array, args: Any) -> jax.Array:
        """Return the time derivatives of angle and velocity at ``y``."""
        del t, args
        return jls.autocast(self.mlp, self.dtype)(y)


def trajectories(law: Any, starts: jax.Array) -> jax.Array:
    """Return the trajectories ``[batch, times, 2]`` from the initial values ``[batch, 2]``."""

    def solve(start: jax.Array) -> jax.Array:
        controller = diffrax.PIDController(rtol=1e-3, atol=1e-4)
        term, solver, saved = diffrax.ODETerm(law), diffrax.Tsit5(), diffrax.SaveAt(ts=TIMES)
        return diffrax.diffeqsolve(
            term, solver, TIMES[0], TIMES[-1], 0.1, start, saveat=saved, stepsize_controller=controller
        ).ys

    return jax.vmap(solve)(starts)


def loss_fn(law: Law, true: jax.Array) -> jax.Array:
    """Return the mean squared error of the trajectories, which start at the same points as the true trajectories."""
    return jnp.mean((trajectories(law, true[:, 0]) - true) ** 2)


def main(arguments: list[str] | None = None) -> None:
    """Train the model, and print the results."""
    parser = command_line.make_parser(__doc__, steps=500, figure="a trajectory, loss and loss scale")
    options = parser.parse_args(arguments)

    dtype = jnp.dtype(options.dtype)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-2, options.steps))
    )
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.

    @eqx.filter_jit
    def train_step(law: Law, opt_state: Any, true: jax.Array) -> tuple[Law, Any, Any]:
        grad_fn = filter_value_and_scaled_grad(loss_fn, opt_state)
        loss, grads = grad_fn(law, true)  # the true loss, and gradients of S * loss
        law, opt_state = tx.update_and_apply(grads, opt_state, law, value=loss)
        return law, opt_state, {"loss": loss, **jls.metrics(opt_state)}

    starts = jax.random.uniform(jax.random.key(0), (TRAIN_EXAMPLES + TEST_EXAMPLES, 2), minval=-1.5, maxval=1.5)
    data = jax.jit(trajectories, static_argnums=0)(pendulum, starts)
    law = Law(jax.random.key(options.seed), dtype)
    opt_state = tx.init(eqx.filter(law, eqx.is_inexact_array))
    keys = jax.random.split(jax.random.key(options.seed + 1), options.steps)
    history = []
    for key in track(keys, options.dtype, console=Console(stderr=True)):
        batch = data[jax.random.choice(key, TRAIN_EXAMPLES, (BATCH_SIZE,), replace=False)]
        law, opt_state, metrics = train_step(law, opt_state, batch)
        history.append(metrics)

    held_out = data[TRAIN_EXAMPLES:]
    learned = eqx.filter_jit(trajectories)(law, held_out[:, 0])
    if options.figure:
        figure = Figure(figsize=(8, 7), layout="constrained")
        picture, curves = figure.subfigures(1, 2)
        ax = picture.subplots()
        for number in range(4):
            ax.plot(*held_out[number].T, ".", color=f"C{number}")
            ax.plot(*learned[number].T, color=f"C{number}")
        ax.set(title="true (dots) and learned", aspect="equal")
        jls.plotting.plot_run(history, axes=curves.subplots(3, sharex=True))
        figure.savefig(options.figure)
    print(f"test error: {jnp.mean((learned - held_out) ** 2):.6f}")
    print(f"loss scale: {history[-1]['loss_scale']:.0f}")
    print(f"skipped steps: {history[-1]['skipped_steps']} of {options.steps}")


if __name__ == "__main__":
    main()
