"""A variational autoencoder in numpyro, trained in float16. The library computes the gradient itself.

The model and the guide are written in float32, as usual in numpyro, with networks of flax linen. `SVI` calls a method
of the optimizer to compute the loss and the gradient. Therefore, the optimizer implements both parts of mixed
precision: `LossScaledOptim.eval_and_update` computes the matrix multiplications of the loss in ``--dtype`` with
`jls.autocast`, and computes the gradients of the scaled loss. The result is measured by the evidence lower bound
(ELBO) of held-out digits.
"""

from collections.abc import Callable
from typing import Any

import command_line
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from matplotlib.figure import Figure
from numpyro import distributions as dist
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Trace_ELBO
from numpyro.optim import _NumPyroOptim, optax_to_numpyro
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

import jax_lossscale as jls

BATCH_SIZE, TRAIN_EXAMPLES = 128, 1400
PIXELS, WIDTH, LATENTS = 64, 128, 8


class LossScaledOptim(_NumPyroOptim):
    """A numpyro optimizer with a `jls.loss_scaled` transformation, which computes losses in ``dtype``."""

    def __init__(self, tx: Any, dtype: Any) -> None:
        plain = optax_to_numpyro(tx)
        functions = plain.init_fn, plain.update_fn, plain.get_params_fn
        super().__init__(lambda: functions, update_with_value=True)
        self.tx, self.dtype = tx, dtype

    def eval_and_update(self, fn: Callable[..., Any], state: Any, forward_mode_differentiation: bool = False) -> Any:
        """Return the loss, and the state after an applied or skipped step. `SVI.update` calls this method."""
        del forward_mode_differentiation
        count, (params, opt_state) = state
        grad_fn = jls.value_and_scaled_grad(jls.autocast(fn, self.dtype), opt_state, has_aux=True)
        (loss, aux), grads = grad_fn(params)  # the true loss, and gradients of S * loss
        return (loss, aux), (count + 1, self.tx.update_and_apply(grads, opt_state, params, value=loss))


class Encoder(nn.Module):
    """A network that maps images to the mean and the standard deviation of the latent variables."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return mean and standard deviation, both ``[batch, latents]``, for images ``[batch, pixels]``."""
        hidden = nn.softplus(nn.Dense(WIDTH)(x))
        return nn.Dense(LATENTS)(hidden), jnp.exp(nn.Dense(LATENTS)(hidden))


class Decoder(nn.Module):
    """A network that maps latent variables to the logits of pixels."""

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        """Return the logits ``[batch, pixels]`` for latent variables ``[batch, latents]``."""
        return nn.Dense(PIXELS)(nn.softplus(nn.Dense(WIDTH)(z)))


def model(x: jax.Array) -> None:
    """Sample black or white pixels, given normally distributed latent variables."""
    decode = flax_module("decoder", Decoder(), input_shape=(1, LATENTS))
    with numpyro.plate("batch", len(x)):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([LATENTS]).to_event(1))
        numpyro.sample("x", dist.Bernoulli(logits=decode(z)).to_event(1), obs=x)


def guide(x: jax.Array) -> None:
    """Sample latent variables, given pixels."""
    encode = flax_module("encoder", Encoder(), input_shape=(1, PIXELS))
    with numpyro.plate("batch", len(x)):
        numpyro.sample("z", dist.Normal(*encode(x)).to_event(1))


def main(arguments: list[str] | None = None) -> None:
    """Train the model, and print the results."""
    parser = command_line.make_parser(
        __doc__, steps=2000, figure="digits, their reconstructions, the loss and the loss scale"
    )
    options = parser.parse_args(arguments)

    dtype = jnp.dtype(options.dtype)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, options.steps))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.
    svi = SVI(model, guide, LossScaledOptim(tx, dtype), Trace_ELBO())
    train_step = jax.jit(svi.update)

    digits = (load_digits().data > 7).astype(np.float32)  # The pixels become 0 or 1.
    random = np.random.default_rng(options.seed)
    state = svi.init(jax.random.key(options.seed), digits[:BATCH_SIZE])
    history = []
    for _ in track(range(options.steps), options.dtype, console=Console(stderr=True)):
        batch = digits[random.choice(TRAIN_EXAMPLES, BATCH_SIZE, replace=False)]
        state, loss = train_step(state, batch)
        history.append({"loss": loss / BATCH_SIZE, **jls.metrics(state.optim_state)})

    params, held_out = svi.get_params(state), digits[TRAIN_EXAMPLES:]
    if options.figure:
        save_figure(options.figure, params, held_out, history)
    elbo = -Trace_ELBO(num_particles=20).loss(jax.random.key(0), params, model, guide, held_out) / len(held_out)
    print(f"held-out bound: {elbo:.4f}")
    print(f"loss scale: {history[-1]['loss_scale']:.0f}")
    print(f"skipped steps: {history[-1]['skipped_steps']} of {options.steps}")


def save_figure(path: Any, params: Any, held_out: np.ndarray, history: list[dict[str, Any]]) -> None:
    """Draw digits above their reconstructions, and the loss and the loss scale below."""
    means, _ = Encoder().apply({"params": params["encoder$params"]}, held_out[:16])
    decoded = jax.nn.sigmoid(Decoder().apply({"params": params["decoder$params"]}, means))
    figure = Figure(figsize=(8, 7), layout="constrained")
    pictures, curves = figure.subfigures(2, height_ratios=[1, 2])
    ax = pictures.subplots()
    rows = [np.concatenate(list(images.reshape(-1, 8, 8)), axis=1) for images in (held_out[:16], np.asarray(decoded))]
    ax.imshow(np.concatenate(rows), cmap="gray")
    ax.axis("off")
    jls.plotting.plot_run(history, axes=curves.subplots(3, sharex=True))
    figure.savefig(path)


if __name__ == "__main__":
    main()
