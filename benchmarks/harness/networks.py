"""Networks as they are trained on GPUs, with batches of random numbers for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.shapes import RESNET50

CLASSES = 1000


class ResNet(nn.Sequential):
    """A residual network of bottlenecks for images (He et al. 2015).

    Args:
        blocks: in each of the four stages.
        width: channels of the first stage.
    """

    def __init__(self, blocks: tuple[int, ...] = RESNET50, width: int = 64) -> None:
        layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(_Bottleneck(channels, width << stage, 2 if stage > 0 and block == 0 else 1))
                channels = 4 * (width << stage)
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *_convolution(channels, width, 1, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, 4 * width, 1, 1),
        )
        same = stride == 1 and channels == 4 * width
        self.beside = nn.Identity() if same else nn.Sequential(*_convolution(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.main(x) + self.beside(x))


def _convolution(channels: int, width: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(width)]


class Transformer(nn.Module):
    """A decoder that predicts the next token, as GPT-2 (Radford et al. 2019); one matrix reads tokens and writes them."""

    def __init__(self, tokens: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places.weight
        return self.layers(hidden, mask=self.mask, is_causal=True) @ self.tokens.weight.T


@dataclass(frozen=True)
class Workload:
    """A network and what it is fed with.

    Attributes:
        unit: what it is fed with.
        units: how many are in a batch.
        batch: makes one: the input and the classes to be predicted.
    """

    unit: str
    units: int
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


def images(batch: int, side: int, **options: int) -> Workload:
    """A ResNet on square images."""
    return Workload(
        unit="images",
        units=batch,
        model=lambda: ResNet(**options),
        batch=lambda: (torch.randn(batch, 3, side, side), torch.randint(CLASSES, (batch,))),
    )


def texts(batch: int, tokens: int, length: int, **options: int) -> Workload:
    """A Transformer on texts of equal length."""

    def draw() -> tuple[Tensor, Tensor]:
        text = torch.randint(tokens, (batch, length + 1))
        return text[:, :-1], text[:, 1:].flatten()

    return Workload(
        unit="tokens",
        units=batch * length,
        model=lambda: Transformer(tokens, length, **options),
        batch=draw,
    )


WORKLOADS = {
    "resnet50": images(batch=32, side=224),
    "transformer": texts(batch=8, tokens=16_384, length=512, width=768, heads=12, layers=12),
}
SMOKE = {
    "resnet50": images(batch=2, side=32, width=8),
    "transformer": texts(batch=2, tokens=64, length=16, width=32, heads=2, layers=2),
}
