"""Time a step of ResNet-50 and of GoogLeNet on this machine, for the simulator.

    .venv/bin/python tools/make_traces.py [--batch 8] [--steps 5] [--output benchmarks/traces]

The models are made of PyTorch's layers in the shapes of their papers (He et al. 2015; Szegedy et al. 2014). GoogLeNet
has its two auxiliary classifiers, whose losses count 0.3 times: without them it has 7 million numbers, and that of the
MG-WFBP paper has 13 million. Of its 69 gradients 59, the number of tensors in that paper, are weights of convolutions.
Hooks note when each gradient is there; the times are medians over the steps. `Trace.scaled` takes them to another
machine.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from horovod_partial.insight.simulate import Gradient, Trace

IMAGE, CLASSES = 224, 1000


# --- ResNet-50 -------------------------------------------------------------------------------------------------------


def normalised(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution with batch normalisation behind it."""
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out))


class Bottleneck(nn.Module):
    """A block of three convolutions, around which its input goes too."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            normalised(channels_in, width, 1),
            nn.ReLU(inplace=True),
            normalised(width, width, 3, stride),
            nn.ReLU(inplace=True),
            normalised(width, 4 * width, 1),
        )
        same = stride == 1 and channels_in == 4 * width
        self.around = nn.Identity() if same else normalised(channels_in, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        return torch.relu(self.body(x) + self.around(x))


def resnet50() -> nn.Module:
    """161 parameter tensors, 25.6 million numbers."""
    layers: list[nn.Module] = [normalised(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if block == 0 and width > 64 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


# --- GoogLeNet -------------------------------------------------------------------------------------------------------


def rectified(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution with a rectifier behind it."""
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.ReLU(inplace=True))


class Inception(nn.Module):
    """Four branches side by side: 1 x 1; 3 x 3 and 5 x 5, each behind a 1 x 1; pooling, before a 1 x 1."""

    def __init__(self, channels: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            (
                rectified(channels, one, 1),
                nn.Sequential(rectified(channels, three[0], 1), rectified(*three, 3)),
                nn.Sequential(rectified(channels, five[0], 1), rectified(*five, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), rectified(channels, pooled, 1)),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The branches' outputs, channels behind channels."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def auxiliary(channels: int) -> nn.Sequential:
    """A classifier in the middle of the model, on 14 x 14 pixels."""
    hidden = [nn.Linear(128 * 4 * 4, 1024), nn.ReLU(inplace=True), nn.Linear(1024, CLASSES)]
    return nn.Sequential(nn.AvgPool2d(5, 3), rectified(channels, 128, 1), nn.Flatten(), *hidden)


class GoogLeNet(nn.Module):
    """69 parameter tensors, 13.4 million numbers."""

    def __init__(self) -> None:
        super().__init__()
        beginning = nn.Sequential(
            rectified(3, 64, 7, 2),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            rectified(64, 64, 1),
            rectified(64, 192, 3),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Inception(192, 64, (96, 128), (16, 32), 32),
            Inception(256, 128, (128, 192), (32, 96), 64),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Inception(480, 192, (96, 208), (16, 48), 64),
        )
        middle = nn.Sequential(
            Inception(512, 160, (112, 224), (24, 64), 64),
            Inception(512, 128, (128, 256), (24, 64), 64),
            Inception(512, 112, (144, 288), (32, 64), 64),
        )
        end = nn.Sequential(
            Inception(528, 256, (160, 320), (32, 128), 128),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Inception(832, 256, (160, 320), (32, 128), 128),
            Inception(832, 384, (192, 384), (48, 128), 128),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(1024, CLASSES),
        )
        self.parts = nn.ModuleList((beginning, middle, end))
        self.auxiliaries = nn.ModuleList((auxiliary(512), auxiliary(528)))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The outputs of the auxiliary classifiers, and of the model."""
        outputs = []
        for part, classifier in zip(self.parts, self.auxiliaries, strict=False):
            x = part(x)
            outputs.append(classifier(x))
        return [*outputs, self.parts[-1](x)]


MODELS: dict[str, Callable[[], nn.Module]] = {"resnet50": resnet50, "googlenet": GoogLeNet}


# --- Timing ----------------------------------------------------------------------------------------------------------


def loss_of(outputs: torch.Tensor | list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy; auxiliary outputs, before the last, count 0.3 times."""
    *before, last = outputs if isinstance(outputs, list) else [outputs]
    losses = [0.3 * nn.functional.cross_entropy(output, labels) for output in before]
    return sum(losses, nn.functional.cross_entropy(last, labels))


def trace(name: str, model: nn.Module, batch: int, steps: int) -> Trace:
    """Time `steps` steps, after one that does not count."""
    images, labels = torch.randn(batch, 3, IMAGE, IMAGE), torch.randint(CLASSES, (batch,))
    there: list[tuple[str, float]] = []
    for parameter_name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, parameter_name=parameter_name: there.append((parameter_name, time.perf_counter()))
        )
    forwards: list[float] = []
    backwards: list[list[float]] = []
    for step in range(steps + 1):
        there.clear()
        start = time.perf_counter()
        loss = loss_of(model(images), labels)
        middle = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        if step > 0:
            times = [middle, *(moment for _, moment in there)]
            forwards.append(middle - start)
            backwards.append([after - before for before, after in itertools.pairwise(times)])
    sizes = {key: value.numel() * value.element_size() for key, value in model.named_parameters()}
    gradients = [
        Gradient(key, sizes[key], statistics.median(seconds))
        for (key, _), seconds in zip(there, zip(*backwards, strict=True), strict=True)
    ]
    return Trace(name, statistics.median(forwards), tuple(gradients))


def main() -> None:
    """Write a file for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="images of a step")
    parser.add_argument("--steps", type=int, default=5, help="to take medians over")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/traces"), help="folder")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name, make in MODELS.items():
        timed = trace(name, make(), options.batch, options.steps)
        timed.save(options.output / f"{name}.json")
        print(
            f"{name}: {len(timed.gradients)} gradients, {timed.nbytes / 1e6:.1f} MB, "
            f"forward {timed.forward:.3f} s, backward {timed.backward:.3f} s"
        )


if __name__ == "__main__":
    main()
