"""Sets of parameter shapes to reduce gradients of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Shape = tuple[int, ...]
RESNET50 = (3, 4, 6, 3)  # blocks


def resnet50() -> list[Shape]:
    """ResNet-50's 161 parameters, 25.6 million numbers, in the order of the model."""
    return [shape for shape, _ in resnet(RESNET50)]


def resnet50_flops() -> list[float]:
    """Multiplications and additions that use each of them, for one image of 224 x 224."""
    return [2.0 * math.prod(shape) * pixels for shape, pixels in resnet(RESNET50)]


def resnet(blocks: Sequence[int]) -> list[tuple[Shape, int]]:
    """Shapes, and the pixels that each layer makes, of a ResNet with so many blocks (He et al. 2015)."""
    layers = [*_convolution(3, 64, 7, 112)]
    channels, side = 64, 56
    for width, count, stride in zip((64, 128, 256, 512), blocks, (1, 2, 2, 2), strict=True):
        for block in range(count):
            layers += _convolution(channels, width, 1, side)
            if block == 0:
                side //= stride
            layers += _convolution(width, width, 3, side)
            layers += _convolution(width, 4 * width, 1, side)
            if block == 0:
                layers += _convolution(channels, 4 * width, 1, side)
            channels = 4 * width
    return [*layers, ((1000, channels), 1), ((1000,), 1)]


def _convolution(channels_in: int, channels_out: int, kernel: int, side: int) -> Iterator[tuple[Shape, int]]:
    yield (channels_out, channels_in, kernel, kernel), side * side
    for _ in range(2):  # its batch normalisation
        yield (channels_out,), side * side


def small() -> list[Shape]:
    """200 tensors of 4 KiB."""
    return [(1024,)] * 200


SETS = {"resnet50": resnet50, "small": small}
