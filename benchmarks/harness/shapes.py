"""Sets of parameter shapes to reduce gradients of."""

from __future__ import annotations

from collections.abc import Iterator

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """ResNet-50's 161 parameters, 25.6 million numbers, in the order of the model."""
    shapes = [*_convolution(3, 64, 7)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _convolution(channels, width, 1)
            shapes += _convolution(width, width, 3)
            shapes += _convolution(width, 4 * width, 1)
            if block == 0:
                shapes += _convolution(channels, 4 * width, 1)
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def _convolution(channels_in: int, channels_out: int, kernel: int) -> Iterator[Shape]:
    yield (channels_out, channels_in, kernel, kernel)
    yield from ((channels_out,), (channels_out,))  # its batch normalisation


def small() -> list[Shape]:
    """200 tensors of 4 KiB."""
    return [(1024,)] * 200


SETS = {"resnet50": resnet50, "small": small}
