"""A transformer of flax with cuDNN's attention, compiled for an H100 that is not there: by hand, and by `in_half`.

::

    python -m benchmarks.autocast.attention
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

import jax_lossscale as jls
from benchmarks import cuda
from benchmarks.gpu_program import read

_KERNEL = re.compile(r'custom_call_target="__cudnn\$fmha(\w+)"')


def fused(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """It refuses float32 when it is traced."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """The same in any dtype, with all scores in memory."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def transformer(attention: Any, dtype: Any = None, blocks: int = 4, width: int = 512, heads: int = 8) -> Any:
    """The blocks."""
    import flax.linen as nn

    class Blocks(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(blocks):
                normed = nn.LayerNorm(dtype=dtype)(x)
                x = x + nn.MultiHeadDotProductAttention(heads, dtype=dtype, attention_fn=attention)(normed)
                hidden = nn.gelu(nn.Dense(4 * width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x)))
                x = x + nn.Dense(width, dtype=dtype)(hidden)
            return x

    return Blocks()


def compiled(attention: Any, dtype: Any, *, narrow: bool, batch: int = 8, context: int = 1024, width: int = 512) -> Any:
    """The text of the program of value and gradients, and the bytes of its temporaries."""
    network = transformer(attention, dtype)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(network.apply(params, x if dtype is None else x.astype(dtype)).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((batch, context, width), jnp.float32)
    arguments = jax.eval_shape(transformer(plain).init, jax.random.key(0), x), x
    there = jax.sharding.SingleDeviceSharding(cuda.devices("1x1x1")[0])
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there), arguments)
    traced = jax.jit(jax.value_and_grad(jls.autocast(loss) if narrow else loss)).trace(*placed)
    program = traced.lower(lowering_platforms=("cuda",)).compile()
    return program.as_text(), program.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Print a row for each way."""
    cuda.start()
    from jax._src.cudnn import fused_attention_stablehlo

    # Asked of the library, which need not be there: that of CUDA 12.9.
    fused_attention_stablehlo.check_cudnn_version = lambda: 91000
    ways = {
        "float32": (plain, None, False),
        "float16 by hand": (plain, jnp.float16, False),
        "float16 by hand, cuDNN's attention": (fused, jnp.float16, False),
        "autocast": (plain, None, True),
        "autocast, in_half(cuDNN's attention)": (jls.in_half(fused, plain), None, True),
    }
    for name, (attention, dtype, narrow) in ways.items():
        text, temporaries = compiled(attention, dtype, narrow=narrow)
        kernels = ", ".join(f"{n} {kernel}" for kernel, n in sorted(Counter(_KERNEL.findall(text)).items()))
        moved = read(text, 0, temporaries)
        print(
            f"{name:38} {temporaries / 2**20:7.0f} MiB {moved.bytes / 2**30:6.2f} GiB {len(moved.kernels):4} {kernels}"
        )


if __name__ == "__main__":
    main()
