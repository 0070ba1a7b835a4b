"""Training a small neural network in float32, and in float16 with and without loss scaling.

A photograph (``china.jpg`` from scikit-learn) is divided into patches of 4 x 4 pixels. Each patch has a code of 32
numbers, and a small network decodes each code into the 48 values of its patch. The codes and the network are trained
together by gradient descent on the mean squared error (an *auto-decoder*, as in DeepSDF). The network is smooth, and
each step uses all patches. Differences between the results are therefore caused by the precision and not by random
batches.

The loss is a mean over 814,080 values. The gradient with respect to each decoded value is therefore 2.5e-6 times the
error of this value. Gradients below ``2**-25`` (about 3e-8) become zero in float16. The better a patch is decoded, the
more of its gradients become zero, and training in float16 without a loss scale stops making progress. In larger
networks, gradients become similarly small because of large batches, long contexts and dense prediction.

References:
  Park et al., DeepSDF: Learning Continuous Signed Distance Functions for Shape Representation, CVPR 2019.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

import jax_lossscale as jls

STEPS = 700
STEPS_PER_CHUNK = 20  # The progress bar is updated after each chunk of steps.
PATCH_SIZE = 4
CODE_SIZE = 32
HIDDEN_SIZE = 64
CODE_LEARNING_RATE = 4e-2
DECODER_LEARNING_RATE = 1e-2

Params = dict[str, Any]


class Trace(NamedTuple):
    """Metrics for each step of a training run, as arrays with the shape ``[steps]``."""

    loss: Any  # dtype=float32, the loss before the step
    # dtype=float32, the fraction of gradient values that are exactly zero, over all values of all parameters. The
    # fraction is measured after the backward pass, before the gradients are unscaled.
    zero_fraction: Any
    loss_scale: Any  # dtype=float32, the loss scale after the step, from `jls.metrics`; 1 without a loss scale
    skipped_steps: Any  # dtype=int32, the number of steps that have been skipped so far, including the current step


class TrainingRun(NamedTuple):
    """The result of one training run."""

    final_loss: float  # the mean squared error after the training, which is always computed in float32
    zero_gradient_fraction: float  # the mean of `Trace.zero_fraction` over all steps, including skipped steps
    skipped_steps: int  # the number of skipped steps, which did not change the parameters
    final_loss_scale: float  # the loss scale after the last step
    trace: Trace


def arms() -> dict[str, tuple[DTypeLike, Any]]:
    """Return the settings of the five training runs by name: the dtype of matmuls and the argument for `jls.get`."""
    return {
        "float32": (jnp.float32, None),
        "float16": (jnp.float16, None),
        "float16_fixed": (jnp.float16, 2.0**15),
        # The initial scale is deliberately far too high, and the growth period is short. This training run shows that a
        # dynamic scale still reaches a suitable value.
        "float16_dynamic": (jnp.float16, jls.DynamicLossScale(2.0**32, increment_period=50)),
        # The automatic scale does not need any settings.
        "float16_auto": (jnp.float16, jls.AutoLossScale()),
    }


def load_patches() -> jax.Array:
    """Return the patches of the photograph: ``float32[patches, values]``, from -0.5 (black) to 0.5 (white)."""
    from sklearn.datasets import load_sample_image

    photograph = load_sample_image("china.jpg")
    height, width, channels = photograph.shape
    rows, columns = height // PATCH_SIZE, width // PATCH_SIZE
    photograph = photograph[: rows * PATCH_SIZE, : columns * PATCH_SIZE]
    patches = photograph.reshape(rows, PATCH_SIZE, columns, PATCH_SIZE, channels).swapaxes(1, 2)
    return jnp.asarray(patches.reshape(rows * columns, -1), jnp.float32) / 255 - 0.5


def init_params(key: jax.Array, patches: jax.Array) -> Params:
    """Return small random codes and a float32 decoder with two hidden layers. Only the shape of ``patches`` is used."""
    count, patch_values = patches.shape
    sizes = [CODE_SIZE, HIDDEN_SIZE, HIDDEN_SIZE, patch_values]
    codes_key, *keys = jax.random.split(key, len(sizes))
    decoder = [
        {"weights": jax.random.normal(k, (fan_in, fan_out)) / math.sqrt(fan_in), "bias": jnp.zeros((1, fan_out))}
        for k, fan_in, fan_out in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]
    return {"codes": 0.1 * jax.random.normal(codes_key, (count, CODE_SIZE)), "decoder": decoder}


def loss_fn(params: Params, patches: jax.Array) -> jax.Array:
    """Return the mean squared error of the decoded patches. `loss_fn` contains no casts to half precision."""
    *hidden_layers, last_layer = params["decoder"]
    activations = params["codes"]
    for layer in hidden_layers:
        activations = jax.nn.silu(activations @ layer["weights"] + layer["bias"])
    decoded = activations @ last_layer["weights"] + last_layer["bias"]
    return jnp.mean(jnp.square(decoded - patches))


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """Return an Adam optimizer with cosine schedules that decrease the learning rates to zero over ``steps`` steps.

    The learning rate of the codes is higher than the learning rate of the decoder, because each code is used by only
    one patch.
    """

    def adam(learning_rate: float) -> optax.GradientTransformation:
        return optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    transforms = {"codes": adam(CODE_LEARNING_RATE), "decoder": adam(DECODER_LEARNING_RATE)}
    return optax.transforms.partition(transforms, {"codes": "codes", "decoder": "decoder"})


def train(
    patches: jax.Array, dtype: DTypeLike, loss_scale: Any, *, steps: int, seed: int, description: str
) -> TrainingRun:
    """Perform one training run and return its result. A progress bar is shown if stderr is a terminal.

    Args:
      patches: ``float32[patches, values]``, the patches to learn, from `load_patches`.
      dtype: the dtype in which `jls.autocast` computes matrix multiplications (matmuls).
      loss_scale: any argument that `jls.get` accepts.
      steps: the number of training steps, at least 1.
      seed: the random seed of the initial parameters.
      description: the text beside the progress bar.
    """
    from rich.console import Console
    from rich.progress import track

    tx = jls.loss_scaled(make_optimizer(steps), loss_scale)

    def train_step(carry: tuple[Params, Any], patches: jax.Array) -> tuple[tuple[Params, Any], Trace]:
        params, opt_state = carry
        loss, grads = jls.value_and_scaled_grad(jls.autocast(loss_fn, dtype), opt_state)(params, patches)
        params, opt_state = tx.update_and_apply(grads, opt_state, params, value=loss)
        metrics = jls.metrics(opt_state)
        trace = Trace(loss, zero_fraction(grads), metrics["loss_scale"], metrics["skipped_steps"])
        return (params, opt_state), trace

    @functools.partial(jax.jit, static_argnames="length", donate_argnames="carry")
    def train_chunk(carry: tuple[Params, Any], patches: jax.Array, *, length: int) -> tuple[tuple[Params, Any], Trace]:
        return jax.lax.scan(lambda carry, _: train_step(carry, patches), carry, length=length)

    params = init_params(jax.random.key(seed), patches)
    carry = params, tx.init(params)
    lengths = [min(STEPS_PER_CHUNK, steps - done) for done in range(0, steps, STEPS_PER_CHUNK)]
    console = Console(stderr=True)
    chunks = []
    for length in track(lengths, description, console=console, transient=True, disable=not console.is_terminal):
        carry, chunk = train_chunk(carry, patches, length=length)
        chunks.append(jax.device_get(chunk))

    params, _ = carry
    trace = Trace(*(np.concatenate(parts) for parts in zip(*chunks, strict=True)))
    zeros, skipped = float(np.mean(trace.zero_fraction, dtype=np.float64)), int(trace.skipped_steps[-1])
    return TrainingRun(float(loss_fn(params, patches)), zeros, skipped, float(trace.loss_scale[-1]), trace)


def zero_fraction(grads: Any) -> jax.Array:
    """Return the fraction of values in a tree that are exactly zero: ``float32[]``, from 0 to 1."""
    leaves = jax.tree.leaves(grads)
    return jnp.stack([jnp.sum(leaf == 0) for leaf in leaves]).sum() / sum(leaf.size for leaf in leaves)
