"""Data that is available on every machine, because it is included in installed packages."""

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
    """Return the source text of Python's standard library without characters that are not ASCII: ``int32[length]``."""
    characters = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        characters += bytes(byte for byte in path.read_bytes() if byte < CHARACTERS)
        if len(characters) >= length:
            return np.frombuffer(bytes(characters[:length]), np.uint8).astype(np.int32)
    raise FileNotFoundError(
        "The source files of Python's standard library, which contain the text to train on, are not installed."
    )


@functools.cache
def words(length: int, vocabulary: int) -> np.ndarray:
    """Return the most frequent words of this text in their order in the text: ``int32[words]``.

    Each word is replaced by its rank: 0 for the most frequent word, and less than ``vocabulary`` for all words.
    """
    found = re.findall(r"[A-Za-z_]\w*", bytes(text(length).astype(np.uint8)).decode("ascii"))
    numbers = {word: number for number, (word, _) in enumerate(collections.Counter(found).most_common(vocabulary))}
    return np.array([numbers[word] for word in found if word in numbers], np.int32)


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the handwritten digits of scikit-learn: ``float32[1797, 64]`` from -1 to 1, and ``int32[1797]`` labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 8 - 1).astype(np.float32), labels.astype(np.int32)


@functools.cache
def photograph_patches(size: int) -> np.ndarray:
    """Return the two photographs of scikit-learn as square patches.

    The result is ``float32[patches, size, size, 3]``, from -1 to 1.
    """
    from sklearn.datasets import load_sample_images

    patches = []
    for photograph in load_sample_images().images:
        rows, columns = photograph.shape[0] // size, photograph.shape[1] // size
        squares = photograph[: rows * size, : columns * size].reshape(rows, size, columns, size, 3).swapaxes(1, 2)
        patches.append(squares.reshape(-1, size, size, 3))
    return (np.concatenate(patches) / 127.5 - 1).astype(np.float32)
