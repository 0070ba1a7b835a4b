"""Data that is on every machine that runs this: it comes inside packages."""

from __future__ import annotations

import collections
import functools
import os
import re
from pathlib import Path

import numpy as np

CHARACTERS = 128  # ASCII


@functools.cache
def text(length: int) -> np.ndarray:
    """Python's own standard library, characters that are not ASCII left out: ``int32[length]``."""
    characters = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        characters += bytes(byte for byte in path.read_bytes() if byte < CHARACTERS)
        if len(characters) >= length:
            return np.frombuffer(bytes(characters[:length]), np.uint8).astype(np.int32)
    raise FileNotFoundError("Python's standard library is not installed as sources; there is no text to train on.")


@functools.cache
def words(length: int, vocabulary: int) -> np.ndarray:
    """The words of such a text, the most frequent first: ``int32[words]``, from 0 to below ``vocabulary``."""
    found = re.findall(r"[A-Za-z_]\w*", bytes(text(length).astype(np.uint8)).decode("ascii"))
    numbers = {word: number for number, (word, _) in enumerate(collections.Counter(found).most_common(vocabulary))}
    return np.array([numbers[word] for word in found if word in numbers], np.int32)


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Handwritten digits of scikit-learn: ``float32[1797, 64]`` from -1 to 1, and labels ``int32[1797]``."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 8 - 1).astype(np.float32), labels.astype(np.int32)


@functools.cache
def photograph_patches(size: int) -> np.ndarray:
    """The two photographs of scikit-learn in squares: ``float32[patches, size, size, 3]``, from -1 to 1."""
    from sklearn.datasets import load_sample_images

    patches = []
    for photograph in load_sample_images().images:
        rows, columns = photograph.shape[0] // size, photograph.shape[1] // size
        squares = photograph[: rows * size, : columns * size].reshape(rows, size, columns, size, 3).swapaxes(1, 2)
        patches.append(squares.reshape(-1, size, size, 3))
    return (np.concatenate(patches) / 127.5 - 1).astype(np.float32)
