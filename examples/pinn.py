"""A network that solves a differential equation (a PINN), trained in float16 in bare JAX.

The equation is the Burgers equation, u_t + u u_x = VISCOSITY u_xx, whose solution is a front that moves to the right.
The network learns the solution from the equation, the initial values, and the values at both boundaries. Its loss
contains first and second derivatives of the network. The code is written in float32, and `jls.autocast` computes the
matrix multiplications of the network and of its derivatives in ``--dtype``. With seed 0, the final error in bfloat16,
which has three bits of precision less than float16, is twice as large.
"""

from typing import Any

import command_line
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

import jax_lossscale as jls

VISCOSITY, WIDTH, LAYERS = 0.05, 48, 3
INSIDE, BORDER = 512, 64  # number of points in a batch

Params = list[dict[str, jax.Array]]


def init_params(key: jax.Array) -> Params:
    """Return the float32 parameters of a network that maps position and time to the solution."""
    sizes = [2, *[WIDTH] * LAYERS, 1]
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"kernel": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "bias": jnp.zeros(outputs)}
        for key, inputs, outputs in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def network(params: Params, x: jax.Array, t: jax.Array) -> jax.Array:
    """Return the output of the network at one position and time, ``float32[]``."""
    hidden = jnp.stack([x, 2 * t - 1])
    for layer in params[:-1]:
        hidden = jnp.tanh(hidden @ layer["kernel"] + layer["bias"])
    return (hidden @ params[-1]["kernel"] + params[-1]["bias"])[0]


def solution(x: jax.Array, t: jax.Array) -> jax.Array:
    """Return the exact solution, which falls from 1 on the left to 0 on the right."""
    return 0.5 - 0.5 * jnp.tanh((x - t / 2) / (4 * VISCOSITY))


def residual(params: Params, x: jax.Array, t: jax.Array) -> jax.Array:
    """Return the residual of the equation at one position and time."""
    u_x = jax.grad(network, argnums=1)
    u_t = jax.grad(network, argnums=2)(params, x, t)
    u_xx = jax.grad(u_x, argnums=1)(params, x, t)
    return u_t + network(params, x, t) * u_x(params, x, t) - VISCOSITY * u_xx


def loss_fn(params: Params, inside: Any, border: Any) -> jax.Array:
    """Return the mean squared residual, plus the mean squared error of the initial and boundary values."""
    missed = jax.vmap(residual, (None, 0, 0))(params, *inside)
    wrong = jax.vmap(network, (None, 0, 0))(params, *border) - solution(*border)
    return jnp.mean(missed**2) + 10 * jnp.mean(wrong**2)


def draw(key: jax.Array) -> tuple[Any, Any]:
    """Draw positions and times in the interior, and points with initial and boundary values."""
    keys = jax.random.split(key, 4)
    inside = jax.random.uniform(keys[0], INSIDE, minval=-1), jax.random.uniform(keys[1], INSIDE)
    places, times = jax.random.uniform(keys[2], BORDER, minval=-1), jax.random.uniform(keys[3], BORDER)
    x = jnp.concatenate([places, jnp.sign(places)])
    t = jnp.concatenate([jnp.zeros(BORDER), times])
    return inside, (x, t)


def main(arguments: list[str] | None = None) -> None:
    """Train the model, and print the results."""
    parser = command_line.make_parser(__doc__, steps=3000, figure="the solution, loss and loss scale")
    options = parser.parse_args(arguments)

    dtype = jnp.dtype(options.dtype)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, options.steps))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.

    @jax.jit
    def train_step(params: Params, opt_state: Any, key: jax.Array) -> tuple[Params, Any, Any]:
        grad_fn = jls.value_and_scaled_grad(jls.autocast(loss_fn, dtype), opt_state)
        loss, grads = grad_fn(params, *draw(key))  # the true loss, and gradients of S * loss
        params, opt_state = tx.update_and_apply(grads, opt_state, params, value=loss)
        return params, opt_state, {"loss": loss, **jls.metrics(opt_state)}

    params = init_params(jax.random.key(options.seed))
    opt_state = tx.init(params)
    keys = jax.random.split(jax.random.key(options.seed + 1), options.steps)
    history = []
    for key in track(keys, options.dtype, console=Console(stderr=True)):
        params, opt_state, metrics = train_step(params, opt_state, key)
        history.append(metrics)

    x, t = jnp.meshgrid(jnp.linspace(-1, 1, 201), jnp.linspace(0, 1, 101))
    found = jax.vmap(jax.vmap(network, (None, 0, 0)), (None, 0, 0))(params, x, t)
    if options.figure:
        figure = Figure(figsize=(8, 7), layout="constrained")
        pictures, curves = figure.subfigures(2, height_ratios=[1, 2])
        for ax, picture, title in zip(pictures.subplots(1, 2), (solution(x, t), found), ("true", "found"), strict=True):
            ax.imshow(picture, extent=(-1, 1, 0, 1), aspect="auto", origin="lower")
            ax.set(title=title, xlabel="x", ylabel="t")
        jls.plotting.plot_run(history, axes=curves.subplots(3, sharex=True))
        figure.savefig(options.figure)
    error = jnp.linalg.norm(found - solution(x, t)) / jnp.linalg.norm(solution(x, t))
    print(f"relative error: {error:.6f}")
    print(f"loss scale: {history[-1]['loss_scale']:.0f}")
    print(f"skipped steps: {history[-1]['skipped_steps']} of {options.steps}")


if __name__ == "__main__":
    main()
