"""The networks of MG-WFBP's table 4, as the sizes of their tensors and what each computes; figure 5; and steps of them.

GoogLeNet's and ResNet-50's steps are timed ones (benchmarks/traces). The others' times are in proportion to the
multiplications of each tensor, for images of 224 x 224. Backward is two thirds of every step: it multiplies twice as
much as forward.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from experiment import Job, Outcome, Plot, Row
from harness import shapes

from horovod_partial.insight.simulate import Gradient, Trace

CLASSES = 1000
TRACES = Path(__file__).parents[1] / "traces"


@dataclass(frozen=True)
class Tensor:
    """A parameter of a network.

    Attributes:
        numbers: that it has.
        macs: multiplications, each with an addition, that use it, for one image.
    """

    numbers: int
    macs: int


# --- Networks --------------------------------------------------------------------------------------------------------


def resnet(blocks: Sequence[int]) -> list[Tensor]:
    """He et al. 2015."""
    layers = [(math.prod(shape), pixels) for shape, pixels in shapes.resnet(blocks)]
    return [Tensor(numbers, numbers * pixels) for numbers, pixels in layers]


def densenet(growth: int, blocks: Sequence[int]) -> list[Tensor]:
    """Huang et al. 2017."""
    channels, side = 2 * growth, 56
    tensors = convolution(3, channels, 49, 112)
    for block, layers in enumerate(blocks):
        if block > 0:
            tensors += before(channels, channels // 2, 1, side)
            channels, side = channels // 2, side // 2
        for _ in range(layers):
            tensors += before(channels, 4 * growth, 1, side) + before(4 * growth, growth, 9, side)
            channels += growth
    return tensors + normalisation(channels, side) + linear(channels)


def inception_v4() -> list[Tensor]:
    """Szegedy et al. 2017. A kernel of 1 x 7 or 7 x 1 has 7 places, one of 1 x 3 or 3 x 1 has 3."""
    stem = chain(3, (9, 32, 111), (9, 32, 109), (9, 64, 109), (9, 96, 54))
    stem += chain(160, (1, 64, 54), (9, 96, 52)) + chain(160, (1, 64, 54), (7, 64, 54), (7, 64, 54), (9, 96, 52))
    stem += chain(192, (9, 192, 25))
    large = chain(384, (1, 96, 25)) + chain(384, (1, 96, 25))
    large += chain(384, (1, 64, 25), (9, 96, 25)) + chain(384, (1, 64, 25), (9, 96, 25), (9, 96, 25))
    to_middle = chain(384, (9, 384, 12)) + chain(384, (1, 192, 25), (9, 224, 25), (9, 256, 12))
    middle = (
        chain(1024, (1, 128, 12)) + chain(1024, (1, 384, 12)) + chain(1024, (1, 192, 12), (7, 224, 12), (7, 256, 12))
    )
    middle += chain(1024, (1, 192, 12), (7, 192, 12), (7, 224, 12), (7, 224, 12), (7, 256, 12))
    to_small = chain(1024, (1, 192, 12), (9, 192, 5))
    to_small += chain(1024, (1, 256, 12), (7, 256, 12), (7, 320, 12), (9, 320, 5))
    small = chain(1536, (1, 256, 5)) + chain(1536, (1, 256, 5))
    small += chain(1536, (1, 384, 5), (3, 256, 5)) + chain(384, (3, 256, 5))  # a branch that ends twice
    small += chain(1536, (1, 384, 5), (3, 448, 5), (3, 512, 5), (3, 256, 5)) + chain(512, (3, 256, 5))  # and another
    return [*stem, *large * 4, *to_middle, *middle * 7, *to_small, *small * 3, *linear(1536)]


def chain(channels: int, *steps: tuple[int, int, int]) -> list[Tensor]:
    """Convolutions one behind the other: places of the kernel, channels made, and the side of the image made."""
    tensors = []
    for places, made, side in steps:
        tensors += convolution(channels, made, places, side)
        channels = made
    return tensors


def convolution(channels_in: int, channels_out: int, places: int, side: int) -> list[Tensor]:
    """With so many places in its kernel, on side x side pixels; batch normalisation behind it."""
    numbers = channels_in * channels_out * places
    return [Tensor(numbers, numbers * side**2), *normalisation(channels_out, side)]


def before(channels_in: int, channels_out: int, places: int, side: int) -> list[Tensor]:
    """The same, with batch normalisation before it."""
    return [*normalisation(channels_in, side), convolution(channels_in, channels_out, places, side)[0]]


def normalisation(channels: int, side: int) -> list[Tensor]:
    return [Tensor(channels, channels * side**2)] * 2


def linear(channels: int) -> list[Tensor]:
    return [Tensor(channels * CLASSES, channels * CLASSES), Tensor(CLASSES, CLASSES)]


NETWORKS: dict[str, Callable[[], list[Tensor]]] = {
    "ResNet-50": partial(resnet, shapes.RESNET50),
    "ResNet-152": partial(resnet, (3, 8, 36, 3)),
    "DenseNet-161": partial(densenet, 48, (6, 12, 36, 24)),
    "DenseNet-201": partial(densenet, 32, (6, 12, 48, 32)),
    "Inception-v4": inception_v4,
}
TIMED = {"GoogLeNet": "googlenet", "ResNet-50": "resnet50"}


# --- Steps -----------------------------------------------------------------------------------------------------------


def step(network: str, compute: float, bytes_per_number: int = 4) -> Trace:
    """A step that takes so many seconds on one GPU."""
    if network in TIMED:
        trace = Trace.load(TRACES / f"{TIMED[network]}.json")
    else:
        tensors = list(enumerate(NETWORKS[network]()))[::-1]
        gradients = [Gradient(str(index), tensor.numbers * bytes_per_number, tensor.macs) for index, tensor in tensors]
        trace = Trace(network, 0.0, tuple(gradients))
    return replace(trace.scaled(compute * 2 / 3), forward=compute / 3)


def by_layer(trace: Trace) -> Trace:
    """The same with one gradient for each layer: its weight and bias travel together."""
    layers = itertools.groupby(trace.gradients, lambda gradient: gradient.name.rpartition(".")[0])
    gradients = []
    for name, members in layers:
        both = list(members)
        gradients.append(Gradient(name, sum(one.nbytes for one in both), sum(one.seconds for one in both)))
    return replace(trace, gradients=tuple(gradients))


# --- Table 4 and figure 5: networks ----------------------------------------------------------------------------------

TABLE4 = {
    "ResNet-50": (161, 25.5, 3.9),
    "ResNet-152": (467, 60.1, 11.61),
    "DenseNet-161": (484, 28.6, 7.85),
    "DenseNet-201": (604, 20, 4.39),
    "Inception-v4": (449, 42.6, 6.16),
}


def table4(job: Job) -> Outcome:
    googlenet = step("GoogLeNet", 1.0)
    main = sum(gradient.nbytes for gradient in googlenet.gradients if not gradient.name.startswith("auxiliaries"))
    rows = [
        Row("GoogLeNet: tensors", "59", len(googlenet.gradients), "computed"),
        Row("GoogLeNet: parameters (M)", "~13", googlenet.nbytes / 4e6, "computed"),
        Row("GoogLeNet without auxiliary classifiers: parameters (M)", "", main / 4e6, "computed"),
    ]
    errors = []
    for network, printed in TABLE4.items():
        tensors = NETWORKS[network]()
        millions = sum(tensor.numbers for tensor in tensors) / 1e6
        macs = sum(tensor.macs for tensor in tensors) / 1e9
        ours = (float(len(tensors)), millions, macs)
        errors.append(max(abs(mine / theirs - 1) for mine, theirs in zip(ours, printed, strict=True)))
        for what, theirs, mine in zip(("tensors", "parameters (M)", "MACs (G)"), printed, ours, strict=True):
            rows.append(Row(f"{network}: {what}", f"{theirs:g}", mine, "computed"))
    worst = max(zip(errors, TABLE4, strict=True))
    biases = sum(gradient.name.endswith("bias") for gradient in googlenet.gradients)
    verdict = (
        f"The other networks are at most {worst[0]:.1%} from the table, {worst[1]} the farthest. GoogLeNet with its auxiliary classifiers, which make the "
        f"13 million, has {len(googlenet.gradients)} tensors where the table has 59; {len(googlenet.gradients) - 2 * biases} are weights of "
        "convolutions, which have no biases here."
    )
    places = [float(index) for index in range(1, len(TABLE4) + 1)]
    series = {
        "paper": (places, [float(printed[1]) for printed in TABLE4.values()]),
        "ours": (places, [sum(tensor.numbers for tensor in NETWORKS[network]()) / 1e6 for network in TABLE4]),
    }
    return Outcome(rows, Plot(", ".join(TABLE4), "million parameters", series, bars=True), verdict)


# How many tensors have so many bytes: what the text prints, and what can be read off.
FIGURE5 = (
    ("ResNet-152", 1024, "150"),
    ("ResNet-152", 4096, "~74"),
    ("ResNet-152", 2**20, "~71"),
    ("ResNet-152", 9 * 2**18, "~36"),
    ("DenseNet-161", 768, "160"),
    ("DenseNet-161", 331_776, "~80"),
    ("DenseNet-201", 147_456, "~100"),
)


def figure5(job: Job) -> Outcome:
    sizes = {network: [4 * tensor.numbers for tensor in make()] for network, make in NETWORKS.items()}
    counts = {network: Counter(values) for network, values in sizes.items()}
    rows = [
        Row(f"{network}: tensors of {nbytes:,} bytes", printed, counts[network][nbytes], "computed")
        for network, nbytes, printed in FIGURE5
    ]
    small = {network: sum(size < 10_000 for size in values) / len(values) for network, values in sizes.items()}
    rows += [
        Row(f"{network}: tensors below 10 kB (%)", "", 100 * share, "computed") for network, share in small.items()
    ]
    series = {}
    for network, values in sizes.items():
        series[network] = (
            [float(size) for size in sorted(values)],
            [(place + 1) / len(values) for place in range(len(values))],
        )
    verdict = (
        f"In each network {min(small.values()):.0%} or more of the tensors are below 10 kB: the claim is borne out."
    )
    if min(small.values()) < 0.5:
        verdict = f"Not in all networks most tensors are small: {min(small.values()):.0%} are below 10 kB in one."
    return Outcome(rows, Plot("bytes", "share of tensors up to that size", series, log_x=True), verdict)
