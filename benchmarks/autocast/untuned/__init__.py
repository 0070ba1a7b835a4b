"""Models that were not used to tune `jls.autocast`, written in flax like the models in `benchmarks.autocast.models`.

The modules, in reading order:

- `layers`: shared layers, and the batches;
- `images`, `language`, `sequences`, `stylegan`, `others`, `further`: the models;
- `table`: the benchmark, ``python -m benchmarks untuned``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from benchmarks.autocast.models import Model
from benchmarks.autocast.untuned.further import EGNN, HSTU, LRU, Autoencoder, Evoformer, Flow, FourierOperator, Swin
from benchmarks.autocast.untuned.images import PPO, ConvNeXt, DiffusionUNet, DiT, MLPMixer, NNUNet, UNet
from benchmarks.autocast.untuned.language import T5, Llama, LSTMLanguageModel, RaggedExperts, lora
from benchmarks.autocast.untuned.layers import Integers, model_of
from benchmarks.autocast.untuned.others import CLIP, DLRM, GraphNetwork, GraphTransformer, NeRF
from benchmarks.autocast.untuned.sequences import CTC, RWKV, Mamba2, RetNet, Transducer, WaveNet
from benchmarks.autocast.untuned.stylegan import stylegan


def networks() -> dict[str, Model]:
    """Return the models by name, in the sizes of the benchmark."""
    llama = {"vocabulary": 32_000, "blocks": 4, "width": 1024, "hidden": 2816, "heads": 16, "groups": 4}
    return {
        "U-Net": _unet(8, 256, widths=(64, 128, 256, 512, 1024), classes=21),
        "GNN": _graph(GraphNetwork, 16_384, 131_072, rounds=4, width=128),
        "WaveNet": _paired(WaveNet, (8, 8192, 1), layers=10, width=128, skip=256),
        "PPO": _ppo(2048),
        "RetNet": _decoder(RetNet, 8, 1025, vocabulary=8192, blocks=4, width=1024, heads=8, chunk=128),
        "RWKV-4": _decoder(RWKV, 8, 513, vocabulary=8192, blocks=4, width=768),
        "LoRA": lora(Integers(32_000, (4, 1025)), rank=16, **llama),
        "DiT": _dit(32, 256, 16, blocks=4, width=768, heads=12),
        "Llama": _decoder(Llama, 4, 1025, **llama),
        "diffusion UNet": _diffusion_unet(32, 64, widths=(128, 256, 256), heads=4),
        "T5": _t5(16, 512, 129, vocabulary=32_128, blocks=4, width=512, heads=8),
        "CTC speech model": _speech(CTC, (16, 1024, 80), (16, 64), vocabulary=1024, blocks=4, width=512, heads=8),
        # XLA fails to compile attention with the lengths of CLIP. These are the lengths of SigLIP (arXiv 2303.15343).
        "CLIP": _clip(64, 256, 64, blocks=4, image_width=768, text_width=512, vocabulary=49_408, patch=16),
        "LSTM language model": _decoder(LSTMLanguageModel, 64, 129, vocabulary=10_000, width=1024),
        "ConvNeXt": _classifier(ConvNeXt, 64, 224, stages=(2, 2, 4, 2), width=96),
        "experts by ragged_dot": _decoder(
            RaggedExperts, 8, 513, vocabulary=32_000, blocks=2, width=768, heads=12, experts=8
        ),
        "graph transformer": _graph(GraphTransformer, 16_384, 131_072, blocks=4, width=128, heads=8),
        "Mamba-2": _decoder(Mamba2, 8, 1025, vocabulary=8192, blocks=4, width=768, heads=24, state=128, chunk=128),
        "RNN-T": _speech(Transducer, (8, 1024, 80), (8, 31), vocabulary=1024, blocks=4, width=512, heads=8),
        "MLP-Mixer": _classifier(MLPMixer, 64, 224, blocks=8, width=512, patch=16),
        "nnU-Net 3D": _nn_unet(2, 96, widths=(32, 64, 128, 256), classes=4),
        "NeRF": _nerf(4096, samples=128, layers=8, width=256),
        "DLRM": _dlrm(8192, 20, tables=16, rows=10_000, width=64),
        "StyleGAN2": stylegan(16, widths=(512, 512, 256, 128, 64), latent=512),
        "EGNN": _egnn(16_384, 131_072, blocks=4, width=128),
        "HSTU": _decoder(HSTU, 16, 513, vocabulary=8192, blocks=4, width=512, heads=8),
        "autoencoder": _autoencoder(8, 128, widths=(128, 256, 512), latent=4),
        # XLA fails to compile windows of 7 x 7 pixels. These are the sizes of Swin V2 (arXiv 2111.09883).
        "Swin": _classifier(Swin, 32, 256, stages=(2, 2, 2), width=96, heads=3, window=8),
        "LRU": _paired(LRU, (32, 1024, 64), blocks=2, width=512, states=256),
        "Fourier operator": _paired(FourierOperator, (16, 128, 128, 3), blocks=4, width=64, modes=16),
        "normalizing flow": model_of(Flow, (16_384, 64), layers=8, width=512),
        "Evoformer": _evoformer(1, 256, blocks=1, width=128, heads=4),
    }


def small() -> dict[str, Model]:
    """Return the models by name, in sizes that run on a CPU within seconds."""
    llama = {"vocabulary": 32, "blocks": 1, "width": 32, "hidden": 64, "heads": 4, "groups": 2}
    return {
        "U-Net": _unet(2, 16, widths=(8, 16), classes=5),
        "GNN": _graph(GraphNetwork, 16, 64, rounds=1, width=16),
        "WaveNet": _paired(WaveNet, (2, 16, 1), layers=3, width=8, skip=16),
        "PPO": _ppo(4),
        "RetNet": _decoder(RetNet, 2, 17, vocabulary=32, blocks=1, width=32, heads=2, chunk=4),
        "RWKV-4": _decoder(RWKV, 2, 17, vocabulary=32, blocks=1, width=16),
        "LoRA": lora(Integers(32, (2, 17)), rank=4, **llama),
        "DiT": _dit(4, 8, 4, blocks=1, width=32, heads=2),
        "Llama": _decoder(Llama, 2, 17, **llama),
        "diffusion UNet": _diffusion_unet(2, 8, widths=(32, 32), heads=2),
        "T5": _t5(2, 16, 9, vocabulary=32, blocks=1, width=32, heads=2),
        "CTC speech model": _speech(CTC, (2, 32, 16), (2, 4), vocabulary=16, blocks=1, width=32, heads=2),
        "CLIP": _clip(4, 8, 8, blocks=1, image_width=32, text_width=16, vocabulary=32, patch=4),
        "LSTM language model": _decoder(LSTMLanguageModel, 2, 17, vocabulary=32, width=16),
        "ConvNeXt": _classifier(ConvNeXt, 2, 32, stages=(1, 1), width=16),
        "experts by ragged_dot": _decoder(RaggedExperts, 2, 17, vocabulary=32, blocks=1, width=16, heads=2, experts=4),
        "graph transformer": _graph(GraphTransformer, 16, 64, blocks=1, width=16, heads=2),
        "Mamba-2": _decoder(Mamba2, 2, 17, vocabulary=32, blocks=1, width=16, heads=2, state=8, chunk=4),
        "RNN-T": _speech(Transducer, (2, 32, 16), (2, 4), vocabulary=16, blocks=1, width=32, heads=2),
        "MLP-Mixer": _classifier(MLPMixer, 2, 32, blocks=1, width=32, patch=8),
        "nnU-Net 3D": _nn_unet(1, 8, widths=(8, 16), classes=4),
        "NeRF": _nerf(16, samples=8, layers=6, width=32),
        "DLRM": _dlrm(8, 4, tables=2, rows=16, width=16),
        "StyleGAN2": stylegan(2, widths=(16, 8), latent=16),
        "EGNN": _egnn(16, 64, blocks=2, width=16),
        "HSTU": _decoder(HSTU, 2, 17, vocabulary=32, blocks=1, width=16, heads=2),
        "autoencoder": _autoencoder(2, 8, widths=(16, 16), latent=4),
        "Swin": _classifier(Swin, 2, 32, stages=(2, 1), width=16, heads=2, window=4),
        "LRU": _paired(LRU, (2, 16, 8), blocks=1, width=16, states=8),
        "Fourier operator": _paired(FourierOperator, (2, 16, 16, 3), blocks=1, width=16, modes=4),
        "normalizing flow": model_of(Flow, (8, 8), layers=2, width=32),
        "Evoformer": _evoformer(1, 8, blocks=1, width=16, heads=2),
    }


def _decoder(network: Callable[..., nn.Module], batch: int, length: int, *, vocabulary: int, **options: Any) -> Model:
    return model_of(network, Integers(vocabulary, (batch, length)), vocabulary=vocabulary, **options)


def _classifier(network: Callable[..., nn.Module], batch: int, size: int, **options: Any) -> Model:
    return model_of(network, (batch, size, size, 3), Integers(1000, (batch,)), **options)


def _unet(batch: int, size: int, *, classes: int, **options: Any) -> Model:
    labels = Integers(classes, (batch, size, size))
    return model_of(UNet, (batch, size, size, 3), labels, classes=classes, **options)


def _nn_unet(batch: int, size: int, *, classes: int, **options: Any) -> Model:
    voxels = (batch, size, size, size)
    return model_of(NNUNet, (*voxels, 1), Integers(classes, voxels), classes=classes, **options)


def _diffusion_unet(batch: int, size: int, **options: Any) -> Model:
    images = (batch, size, size, 3)
    return model_of(DiffusionUNet, images, images, Integers(1000, (batch,)), **options)


def _dit(batch: int, length: int, values: int, **options: Any) -> Model:
    patches, times = (batch, length, values), Integers(1000, (batch,))
    return model_of(DiT, patches, patches, times, times, **options)


def _ppo(batch: int, actions: int = 18) -> Model:
    frames = Integers(256, (batch, 84, 84, 4), jnp.uint8)
    return model_of(PPO, frames, Integers(actions, (batch,)), (batch,), (batch,), (batch,), actions=actions)


def _graph(network: Callable[..., nn.Module], nodes: int, edges: int, **options: Any) -> Model:
    ends = Integers(nodes, (edges,))
    return model_of(network, (nodes, 16), (edges, 4), ends, ends, (nodes, 3), **options)


def _egnn(nodes: int, edges: int, **options: Any) -> Model:
    ends = Integers(nodes, (edges,))
    return model_of(EGNN, (nodes, 16), (nodes, 3), ends, ends, (nodes, 3), **options)


def _t5(batch: int, inputs: int, outputs: int, *, vocabulary: int, **options: Any) -> Model:
    tokens = (Integers(vocabulary, (batch, length)) for length in (inputs, outputs))
    return model_of(T5, *tokens, vocabulary=vocabulary, **options)


def _paired(network: Callable[..., nn.Module], shape: tuple[int, ...], **options: Any) -> Model:
    """Return a model whose inputs and targets have the same shape."""
    return model_of(network, shape, shape, **options)


def _autoencoder(batch: int, size: int, *, widths: tuple[int, ...], latent: int) -> Model:
    small = size // 2 ** (len(widths) - 1)
    return model_of(Autoencoder, (batch, size, size, 3), (batch, small, small, latent), widths=widths, latent=latent)


def _evoformer(batch: int, residues: int, **options: Any) -> Model:
    pairs = (batch, residues, residues)
    return model_of(Evoformer, (*pairs, 32), Integers(64, pairs), **options)


def _speech(
    network: Callable[..., nn.Module],
    spectrum: tuple[int, ...],
    labels: tuple[int, ...],
    *,
    vocabulary: int,
    **options: Any,
) -> Model:
    return model_of(network, spectrum, Integers(vocabulary - 1, labels), vocabulary=vocabulary, **options)


def _clip(batch: int, size: int, length: int, *, vocabulary: int, **options: Any) -> Model:
    tokens = Integers(vocabulary, (batch, length))
    return model_of(CLIP, (batch, size, size, 3), tokens, vocabulary=vocabulary, **options)


def _nerf(rays: int, **options: Any) -> Model:
    vectors = (rays, 3)
    return model_of(NeRF, vectors, vectors, vectors, **options)


def _dlrm(batch: int, categories: int, *, tables: int, rows: int, **options: Any) -> Model:
    bags = Integers(rows, (batch, tables, categories))
    return model_of(DLRM, (batch, 13), bags, Integers(2, (batch,), jnp.float32), tables=tables, rows=rows, **options)
