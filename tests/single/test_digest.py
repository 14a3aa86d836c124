"""What ranks tell of their replicas, to compare them."""

import random

import numpy as np
import pytest

import horovod_partial.torch  # noqa: F401 (loads Horovod, which the extension needs)
from horovod_partial.runtime.healing import Array, digest

DTYPES = ("float16", "float32", "float64", "complex64", "int8", "int64", "bool")
WIDTHS = (1, 3, 64, 512, 768, 1000, 1024, 4096)
CHANGES = ("flips", "swap", "swap of rows", "permutation", "permutation of rows", "shift", "signs of two columns")


def of(values: Array) -> int:
    return digest({("parameter", "weight", ""): np.ascontiguousarray(values).reshape(-1).view(np.uint8)})


def changed(values: Array, change: str, generator: np.random.Generator) -> Array:
    """Two dimensions, of which one or two lines, or elements, or bits differ."""
    new, (rows, columns) = values.copy(), values.shape
    row, other = generator.choice(rows, 2, replace=False)
    column = generator.integers(columns)
    if change == "flips":  # of the same bit twice
        bits = new.reshape(-1).view(np.uint8).reshape(rows, -1)
        bits[[row, other], generator.integers(bits.shape[1])] ^= np.uint8(1 << generator.integers(8))
    elif change == "swap":
        new[row, column], new[other, column] = values[other, column], values[row, column]
    elif change == "swap of rows":
        new[[row, other]] = values[[other, row]]
    elif change == "permutation":
        new = generator.permutation(values.reshape(-1)).reshape(values.shape)
    elif change == "permutation of rows":
        new = generator.permutation(values)
    elif change == "shift":
        new = np.roll(values, columns)
    else:
        signs = new.view(np.uint8).reshape(rows, columns, -1)[:, :, -1]
        signs[:, [column, (column + 1) % columns]] ^= 0x80
    return new


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_digest_sees_each_difference(width: int, dtype: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    values = generator.integers(0, 256, (130, width * kind.itemsize), np.uint8).view(kind)
    before = of(values)
    for change in CHANGES:
        new = changed(values, change, generator)
        if new.tobytes() != values.tobytes():
            assert of(new) != before, change
        assert of(values) == before
