"""Programs that are compiled for a TPU, which is not necessary for it. They need libtpu: ``pip install "jax[tpu]"``."""

import os
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls

pytest.importorskip("libtpu")
pytestmark = [pytest.mark.slow, pytest.mark.as_for_users]

WIDTH, BLOCKS = 256, 12
ADAM = optax.adam(1e-3)


@pytest.fixture(scope="module")
def devices():
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE="v5litepod-4")
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


def block(x, layer):
    hidden = jax.nn.gelu(x @ layer["in"] + layer["bias"][None])
    return x + hidden @ layer["out"]


def unrolled(params, x):
    for n in range(BLOCKS):
        x = block(x, jax.tree.map(lambda leaf, n=n: leaf[n], params))
    return jnp.mean(x**2)


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, layer: (jax.checkpoint(block)(x, layer), None), x, params)
    return jnp.mean(x**2)


def attention(params, x):
    heads = [(x @ params["in"][n]).reshape(-1, 8, WIDTH // 2) for n in range(3)]
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", *heads[:2]))
    mixed = jnp.einsum("hqk,khd->qhd", weights, heads[2]).reshape(-1, 4 * WIDTH)
    logits = mixed @ params["out"][0]
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(x)) % WIDTH).mean()


def shapes(dtype):
    sizes = {"in": (BLOCKS, WIDTH, 4 * WIDTH), "bias": (BLOCKS, 4 * WIDTH), "out": (BLOCKS, 4 * WIDTH, WIDTH)}
    return {name: jax.ShapeDtypeStruct(size, dtype) for name, size in sizes.items()}


def training_step(loss_fn, tx, dtype):
    def step(params, state, x):
        value, grads = jls.value_and_scaled_grad(jls.autocast(loss_fn, dtype), state)(params, x)
        return *tx.update_and_apply(grads, state, params, value=value), value

    return jax.jit(step, donate_argnums=(0, 1))


def compiled(loss_fn, tx, dtype, sharding_of, param_dtype=jnp.float32):
    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(leaf))

    params = shapes(param_dtype)
    batch = jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)
    arguments = jax.tree.map(place, (params, jax.eval_shape(tx.init, params), batch))
    return training_step(loss_fn, tx, dtype).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


@pytest.mark.parametrize("loss_fn", [unrolled, scanned, attention])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_training_steps(devices, loss_fn, dtype):
    tx = jls.loss_scaled(ADAM, jls.loss_scale_for(dtype))
    program = compiled(loss_fn, tx, dtype, lambda leaf: jax.sharding.SingleDeviceSharding(devices[0]))
    text = program.as_text()
    assert "opt-barrier" not in text
    assert not re.search(r"= f32\[\S* (convolution|dot)\(", text)  # All matmuls have results in half precision.
    # The parameters and the state are updated in place.
    analysis = program.memory_analysis()
    assert analysis.alias_size_in_bytes > 0.99 * 3 * 4 * sum(leaf.size for leaf in shapes(jnp.float32).values())


@pytest.mark.parametrize(
    "tx",
    [
        jls.stochastic_rounding(jls.half_precision_state(ADAM)),
        jls.master_weights(jls.half_precision_state(ADAM)),
        jls.loss_scaled(jls.master_weights(optax.chain(optax.clip_by_global_norm(1.0), ADAM)), None),
    ],
    ids=["stochastic", "master", "loss_scaled"],
)
def test_steps_with_16_bit_parameters(devices, tx):
    tx = tx if hasattr(tx, "update_and_apply") else jls.loss_scaled(tx, None)
    place = jax.sharding.SingleDeviceSharding(devices[0])
    program = compiled(unrolled, tx, jnp.bfloat16, lambda leaf: place, jnp.bfloat16)
    assert program.memory_analysis().alias_size_in_bytes > 0


def test_sharded_weights_are_gathered_in_half_precision(devices):
    mesh = Mesh(devices, ("data",))

    def sharding_of(leaf):
        is_array = leaf.ndim > 0 and leaf.shape[-1] % len(devices) == 0
        return NamedSharding(mesh, P(*[None] * (leaf.ndim - 1), "data") if is_array else P())

    text = compiled(unrolled, jls.loss_scaled(ADAM, None), jnp.bfloat16, sharding_of).as_text()
    gathered = re.findall(r"= \(?(\w+)\[(\d+),(\d+)\S* all-gather", text)
    assert gathered
    assert all(dtype == "bf16" for dtype, *_ in gathered)
