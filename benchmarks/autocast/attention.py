"""A transformer of flax with cuDNN's attention, compiled for an H100 that is not there: by hand, and by `in_half`.

::

    python -m benchmarks.autocast.attention
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jax_lossscale as jls
from benchmarks import cuda
from benchmarks.gpu_program import read

BLOCKS, WIDTH, HEADS, BATCH, CONTEXT = 4, 512, 8, 8, 1024
_FORWARD, _BACKWARD = (f'custom_call_target="__cudnn$fmha{name}"' for name in ("Softmax", "SoftmaxBackward"))


def compile_for(attention: Any, dtype: Any, *, narrow: bool) -> Any:
    """The program of value and gradients; ``narrow``: of the loss under `autocast`."""
    import flax.linen as nn

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(BLOCKS):
                layer = nn.MultiHeadDotProductAttention(HEADS, dtype=dtype, attention_fn=attention)
                x = x + layer(nn.LayerNorm(dtype=dtype)(x))
                hidden = nn.gelu(nn.Dense(4 * WIDTH, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x)))
                x = x + nn.Dense(WIDTH, dtype=dtype)(hidden)
            return x

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(Transformer().apply(params, x.astype(dtype or x.dtype)).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((BATCH, CONTEXT, WIDTH), jnp.float32)
    params = jax.eval_shape(Transformer().init, jax.random.key(0), x.update(dtype=dtype or x.dtype))
    return cuda.compile_for_one(jax.jit(jax.value_and_grad(jls.autocast(loss) if narrow else loss)), params, x)


def main() -> None:
    """Print a row for each way."""
    cuda.start()
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = lambda: 91000  # else JAX asks cuDNN, which need not be there
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    fused = functools.partial(plain, implementation="cudnn")
    ways = {
        "float32": (plain, None, False),
        "by hand": (plain, jnp.float16, False),
        "by hand, cuDNN": (fused, jnp.float16, False),
        "autocast": (plain, None, True),
        "autocast, in_half(cuDNN)": (jls.in_half(fused, plain), None, True),
    }
    for name, (attention, dtype, narrow) in ways.items():
        made = compile_for(attention, dtype, narrow=narrow)
        text = made.as_text()
        program = read(text, made.memory_analysis().temp_size_in_bytes)
        print(
            f"{name:24} {1e3 * program.seconds:.2f} ms predicted, {program.temporaries / 2**20:4.0f} MiB temporaries, "
            f"{len(program.kernels)} kernels, {program.bytes / 2**30:.1f} GiB moved; "
            f"cuDNN's: {text.count(_FORWARD)}, backward {text.count(_BACKWARD)}"
        )


if __name__ == "__main__":
    main()
