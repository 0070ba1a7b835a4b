"""Fine-tuning with LoRA in flax nnx: a frozen base stored in 16 bits, and float32 adapters that are trained.

The base is the transformer of ``nnx_transformer.py`` with more layers and a larger width. It is first trained on
Python code, with matrix multiplications in ``--dtype``, and its parameters are then stored in this dtype. After that,
adapters in its blocks are trained on C code, the headers of NumPy. `jls.autocast` uses the stored 16-bit parameters
directly. The optimizer contains only the adapters.
"""

import functools
from pathlib import Path
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from nnx_transformer import CHARACTERS, CONTEXT, Transformer, load_text, loss_fn
from rich.console import Console
from rich.progress import track

import jax_lossscale as jls
from jax_lossscale.interop.flax import Optimizer

WIDTH, LAYERS, RANK = 128, 4, 8
BASE_STEPS, BATCH_SIZE = 200, 16
TEST_SHARE = 10  # The first tenth of the C code is held out.


def load_c() -> np.ndarray:
    """Return the ASCII characters of the C headers of NumPy, ``int32[characters]``."""
    headers = b"".join(path.read_bytes() for path in sorted(Path(np.get_include()).rglob("*.h")))
    text = np.frombuffer(headers, np.uint8)
    return text[text < CHARACTERS].astype(np.int32)


def windows_of(text: np.ndarray) -> np.ndarray:
    """Return all windows of the text, ``int32[windows, CONTEXT + 1]``."""
    return np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)


def store(model: Transformer, dtype: Any) -> None:
    """Convert all parameters of the model to a dtype."""
    nnx.update(model, jls.cast_floating(nnx.state(model, nnx.Param), dtype))


def add_adapters(model: Transformer, rngs: nnx.Rngs) -> None:
    """Add an adapter to both layers of the network in each block. Its initial output is zero."""
    for block in model.blocks:
        for name in ("expand", "contract"):
            base = getattr(block, name)
            adapted = nnx.LoRA(base.in_features, RANK, base.out_features, base_module=base, rngs=rngs)
            setattr(block, name, adapted)


def number_of(model: Transformer, kind: type[nnx.Variable]) -> int:
    """Return the number of parameters of the given kind."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, kind)))


@functools.partial(nnx.jit, static_argnames=("trained", "dtype"))
def train_step(model: Transformer, opt: Optimizer, text: jax.Array, trained: type[nnx.Variable], dtype: Any) -> Any:
    """Update the trained parameters and the optimizer in place, and return the loss before the step."""

    def scaled_loss(model: Transformer) -> jax.Array:
        loss = jls.autocast(loss_fn, dtype)(model, text)
        return jls.scale_gradient(loss, opt.opt_state)  # the true loss, and gradients of S * loss

    loss, grads = nnx.value_and_grad(scaled_loss, argnums=nnx.DiffState(0, trained))(model)
    opt.update(model, grads, value=loss)
    return loss


def train(
    model: Transformer, windows: np.ndarray, steps: int, rate: float, trained: type[nnx.Variable], dtype: Any, seed: int
) -> list[dict[str, Any]]:
    """Train the parameters of one kind, and return the loss and the metrics of each step."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.
    opt = Optimizer(model, tx, wrt=trained)
    random, history = np.random.default_rng(seed), []
    for _ in track(range(steps), f"{trained.__name__}, {dtype}", console=Console(stderr=True)):
        batch = windows[random.integers(len(windows), size=BATCH_SIZE)]
        loss = train_step(model, opt, batch, trained, dtype)
        history.append({"loss": loss, **jls.metrics(opt.opt_state)})
    return history


def main(arguments: list[str] | None = None) -> None:
    """Train the base and then the adapters, and print the results."""
    parser = command_line.make_parser(__doc__, steps=100, figure="loss and loss scale of the adapters")
    parser.add_argument(
        "--base-steps", type=command_line.at_least(1), default=BASE_STEPS, metavar="N", help="(default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    dtype, rngs = jnp.dtype(options.dtype), nnx.Rngs(options.seed)

    model = Transformer(rngs, WIDTH, LAYERS)
    train(model, windows_of(load_text()), options.base_steps, 3e-3, nnx.Param, dtype, options.seed)

    c = load_c()
    held_out = len(c) // TEST_SHARE
    test = windows_of(c[:held_out])[:: held_out // 64]
    evaluate = nnx.jit(loss_fn)
    base_parameters = number_of(model, nnx.Param)
    print(f"test loss of the base: {evaluate(model, test):.4f}")

    store(model, dtype)
    add_adapters(model, rngs)
    history = train(model, windows_of(c[held_out:]), options.steps, 3e-3, nnx.LoRAParam, dtype, options.seed)

    if options.figure:
        jls.plotting.plot_run(history)[0].figure.savefig(options.figure)
    print(f"test loss: {evaluate(model, test):.4f}")
    print(f"trained parameters: {number_of(model, nnx.LoRAParam)} of {base_parameters}")
    print(f"loss scale: {history[-1]['loss_scale']:.0f}")
    print(f"skipped steps: {history[-1]['skipped_steps']} of {options.steps}")


if __name__ == "__main__":
    main()
