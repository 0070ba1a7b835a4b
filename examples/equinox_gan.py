"""An equinox GAN, trained in float16, with two networks, two losses, and two optimizers with separate loss scales.

A generator learns to draw digits like the handwritten digits of scikit-learn, and a critic learns to distinguish the
drawn digits from the true digits. The gradients of the two losses have different sizes, which change independently.
Therefore, each optimizer is wrapped separately, and one may skip a step that the other takes. The code is written in
float32, and `jls.autocast` computes the matrix multiplications of both losses in ``--dtype``. The result is measured
by the sliced Wasserstein distance between drawn and true digits.
"""

from pathlib import Path
from typing import Any

import command_line
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

import jax_lossscale as jls
from jax_lossscale.interop.equinox import filter_value_and_scaled_grad

BATCH_SIZE, NOISE_SIZE, PIXELS = 128, 32, 64


def make_networks(key: jax.Array) -> tuple[eqx.nn.MLP, eqx.nn.MLP]:
    """Return the generator and the critic."""
    generator_key, critic_key = jax.random.split(key)
    generator = eqx.nn.MLP(NOISE_SIZE, PIXELS, 128, 2, final_activation=jnp.tanh, key=generator_key)
    critic = eqx.nn.MLP(PIXELS, "scalar", 128, 2, activation=jax.nn.leaky_relu, key=critic_key)
    return generator, critic


def generator_loss(generator: eqx.nn.MLP, critic: eqx.nn.MLP, noise: jax.Array) -> jax.Array:
    """Return the loss of the generator, which is low if the critic classifies the drawn digits as true."""
    drawn = jax.vmap(generator)(noise)
    return jax.nn.softplus(-jax.vmap(critic)(drawn)).mean()


def critic_loss(critic: eqx.nn.MLP, generator: eqx.nn.MLP, digits: jax.Array, noise: jax.Array) -> jax.Array:
    """Return the loss of the critic, which is low if it distinguishes drawn from true digits."""
    drawn = jax.vmap(generator)(noise)
    return jnp.mean(jax.nn.softplus(jax.vmap(critic)(drawn)) + jax.nn.softplus(-jax.vmap(critic)(digits)))


def sliced_wasserstein(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return the mean distance of two point sets of equal size, projected onto 256 random lines."""
    lines = jax.random.normal(jax.random.key(0), (PIXELS, 256))
    lines = lines / jnp.linalg.norm(lines, axis=0, keepdims=True)
    return jnp.mean(jnp.abs(jnp.sort(one @ lines, axis=0) - jnp.sort(other @ lines, axis=0)))


def main(arguments: list[str] | None = None) -> None:
    """Train the model, and print the results."""
    parser = command_line.make_parser(__doc__, steps=2000, figure="the loss scales and some digits")
    options = parser.parse_args(arguments)

    dtype = jnp.dtype(options.dtype)
    loss_scale = jls.loss_scale_for(dtype)  # Only float16 needs a loss scale.
    rate = optax.cosine_decay_schedule(1e-3, options.steps)
    generator_tx = jls.loss_scaled(optax.adam(rate, b1=0.5), loss_scale)
    critic_tx = jls.loss_scaled(optax.adam(rate, b1=0.5), loss_scale)

    @eqx.filter_jit
    def train_step(networks: Any, opt_states: Any, digits: jax.Array, key: jax.Array) -> tuple[Any, Any, Any]:
        (generator, critic), (generator_state, critic_state) = networks, opt_states
        noise = jax.random.normal(key, (2, len(digits), NOISE_SIZE))

        grad_fn = filter_value_and_scaled_grad(jls.autocast(critic_loss, dtype), critic_state)
        loss, grads = grad_fn(critic, generator, digits, noise[0])  # the true loss, and gradients of S * loss
        critic, critic_state = critic_tx.update_and_apply(grads, critic_state, critic, value=loss)

        grad_fn = filter_value_and_scaled_grad(jls.autocast(generator_loss, dtype), generator_state)
        loss, grads = grad_fn(generator, critic, noise[1])
        generator, generator_state = generator_tx.update_and_apply(grads, generator_state, generator, value=loss)

        metrics = {"generator": jls.metrics(generator_state), "critic": jls.metrics(critic_state)}
        return (generator, critic), (generator_state, critic_state), metrics

    generator, critic = networks = make_networks(jax.random.key(options.seed))
    opt_states = (
        generator_tx.init(eqx.filter(generator, eqx.is_inexact_array)),
        critic_tx.init(eqx.filter(critic, eqx.is_inexact_array)),
    )
    digits = load_digits().data.astype(np.float32) / 8 - 1
    random = np.random.default_rng(options.seed)
    keys = jax.random.split(jax.random.key(options.seed + 1), options.steps)
    history = []
    for key in track(keys, options.dtype, console=Console(stderr=True)):
        batch = digits[random.integers(len(digits), size=BATCH_SIZE)]
        networks, opt_states, metrics = train_step(networks, opt_states, batch, key)
        history.append(metrics)

    drawn = jax.vmap(networks[0])(jax.random.normal(jax.random.key(0), (len(digits), NOISE_SIZE)))
    if options.figure:
        save_figure(options.figure, drawn, history)
    print(f"distance of drawn and true digits: {sliced_wasserstein(drawn, digits):.4f}")
    for name, metrics in history[-1].items():
        print(f"loss scale of the {name}: {metrics['loss_scale']:.0f}")
        print(f"skipped steps of the {name}: {metrics['skipped_steps']} of {options.steps}")


def save_figure(path: Path, drawn: jax.Array, history: list[dict[str, Any]]) -> None:
    """Draw digits above, and the two loss scales below."""
    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.subplot_mosaic([["digits"], ["generator"], ["critic"]], height_ratios=[3, 1, 1])
    separate = np.pad(drawn[:128].reshape(8, 16, 8, 8), ((0, 0), (0, 0), (1, 1), (1, 1)))
    picture = separate.swapaxes(1, 2).reshape(80, 160)
    axes["digits"].imshow(picture, cmap="gray")
    axes["digits"].axis("off")
    for name in "generator", "critic":
        loss_scales = [metrics[name]["loss_scale"] for metrics in history]
        skipped = [metrics[name]["consecutive_skips"] > 0 for metrics in history]
        jls.plotting.plot_loss_scale(jax.device_get(loss_scales), jax.device_get(skipped), ax=axes[name])
        axes[name].set_title(f"loss scale of the {name}", loc="left")
    figure.savefig(path)


if __name__ == "__main__":
    main()
