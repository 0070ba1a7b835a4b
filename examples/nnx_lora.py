"""Fine-tuning with LoRA in flax nnx: a frozen base stored in 16 bits, and float32 adapters, which alone are trained.

The base is the transformer of ``nnx_transformer.py``, wider and deeper. It learns Python first, in ``--dtype``, and is
stored in that dtype. Then adapters in its blocks learn C from NumPy's headers. `jls.autocast` takes the base as it is
stored, and the optimizer knows the adapters only.
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
TEST_SHARE = 10  # the first tenth of C is held out


def load_c() -> np.ndarray:
    """NumPy's C headers, characters that are not ASCII left out: ``int32[characters]``."""
    headers = b"".join(path.read_bytes() for path in sorted(Path(np.get_include()).rglob("*.h")))
    text = np.frombuffer(headers, np.uint8)
    return text[text < CHARACTERS].astype(np.int32)


def windows_of(text: np.ndarray) -> np.ndarray:
    """All pieces of the text that a step may see: ``int32[pieces, CONTEXT + 1]``."""
    return np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)


def store(model: Transformer, dtype: Any) -> None:
    """Keep all parameters in this dtype from now on."""
    nnx.update(model, jls.cast_floating(nnx.state(model, nnx.Param), dtype))


def add_adapters(model: Transformer, rngs: nnx.Rngs) -> None:
    """Put one around both layers of the network in each block. At first it adds zero."""
    for block in model.blocks:
        for name in ("expand", "contract"):
            base = getattr(block, name)
            adapted = nnx.LoRA(base.in_features, RANK, base.out_features, base_module=base, rngs=rngs)
            setattr(block, name, adapted)


def number_of(model: Transformer, kind: type[nnx.Variable]) -> int:
    """How many parameters of this kind the model has."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, kind)))


@functools.partial(nnx.jit, static_argnames=("trained", "dtype"))
def train_step(model: Transformer, opt: Optimizer, text: jax.Array, trained: type[nnx.Variable], dtype: Any) -> Any:
    """Update in place what is trained, and the optimizer, or skip; the loss before."""

    def scaled_loss(model: Transformer) -> jax.Array:
        loss = jls.autocast(loss_fn, dtype)(model, text)
        return jls.scale_gradient(loss, opt.opt_state)  # the true loss; gradients of S * loss

    loss, grads = nnx.value_and_grad(scaled_loss, argnums=nnx.DiffState(0, trained))(model)
    opt.update(model, grads, value=loss)
    return loss


def train(
    model: Transformer, windows: np.ndarray, steps: int, rate: float, trained: type[nnx.Variable], dtype: Any, seed: int
) -> list[dict[str, Any]]:
    """Train the parameters of one kind; loss and metrics of each step."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # float16 needs one
    opt = Optimizer(model, tx, wrt=trained)
    random, history = np.random.default_rng(seed), []
    for _ in track(range(steps), f"{trained.__name__}, {dtype}", console=Console(stderr=True)):
        batch = windows[random.integers(len(windows), size=BATCH_SIZE)]
        loss = train_step(model, opt, batch, trained, dtype)
        history.append({"loss": loss, **jls.metrics(opt.opt_state)})
    return history


def main(arguments: list[str] | None = None) -> None:
    """Train the base, then the adapters, and print what came of it."""
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
