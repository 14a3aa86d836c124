"""What a step costs where nobody is slow: ours against Horovod's own, without any compute.

    .venv/bin/python benchmarks/overhead.py [--framework tensorflow] [--device cuda] [--json FILE] [--transport gloo]

Every arm has its own copy of the parameters, and its gradients come from a backward that does next to nothing. In
PyTorch all are optimizers; in TensorFlow ours are optimizers of Keras in the step of `model.fit`, and Horovod's is its
tape (harness/steps_*.py). The arms take turns in blocks of a few steps, each behind a barrier. In six turns each arm has
had every place and has followed every other arm once (harness/alternating.py). A figure is the geometric mean, over the
turns, of an arm's time over that of Horovod, with its 95 % interval (Student's t). Horovod is there twice, and its time in
a turn is the mean of both. Where 1 is outside of the interval of one over the other, more than chance makes them differ,
and the figures mean nothing. Under a policy that closes rounds without some ranks, the number of rounds may differ from
the number of steps. So the benchmark reports rounds per step, and how often a rank was missing from a round.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import harness
from harness import ratios, shapes

OURS = ("full", "quorum of all", "majority", "solo")
SHORTER = {"resnet50": 1, "small": 5}  # times; blocks of short steps have as many more
QUICK_SECONDS = 10.0  # for a set of shapes


def measure(module: str, steps: int, block: int, seconds: float | None) -> Iterator[dict[str, Any]]:
    """On every rank: for each set of shapes, the seconds of a step in each block of each arm; rounds and late gradients."""
    own = importlib.import_module(module)
    measured: dict[str, Any] = {"seconds": {}, "counts": {}}
    for shape_set, draw in shapes.SETS.items():
        arms = own.make_steps(shape_set, draw())
        buckets = {name: first_step(step, own) for name, step in arms.items()}
        stage = f"overhead, {shape_set}"
        measured["seconds"][shape_set] = harness.alternate(
            stage, arms, own, blocks=-(-steps // block), block=SHORTER[shape_set] * block, seconds=seconds
        )
        stats = own.bucket_stats()
        measured["counts"][shape_set] = {
            name: counts([stats[bucket] for bucket in of_arm]) for name, of_arm in buckets.items() if of_arm
        }
        yield measured


def first_step(step: Callable[[], Any], own: Any) -> list[str]:
    """Take an arm's first step. Returns the buckets that it has made."""
    before = set(own.bucket_stats())
    step()
    own.barrier()
    return [name for name in own.bucket_stats() if name not in before]


def counts(stats: list[dict[str, Any]]) -> dict[str, float]:
    """Rounds over the steps of a rank, and the share of places in rounds (rounds times ranks) whose rank had not arrived."""
    rounds = sum(of["rounds"] for of in stats)
    ranks = len(stats[0]["late"])
    steps = sum(sum(of["gradients"]) for of in stats) / ranks
    return {"rounds by step": rounds / steps, "missing": sum(sum(of["late"]) for of in stats) / (rounds * ranks)}


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4, device=True)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="whose optimizers")
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="of each arm with ResNet-50's tensors; small ones have five times as many",
    )
    parser.add_argument("--block", type=int, default=4, help="steps that an arm takes in a row, likewise")
    options = parser.parse_args()
    if options.framework != "torch" and options.device != "cpu":
        parser.error("--device is for --framework torch")

    about = {"framework": options.framework, "ranks": options.ranks, "transport": options.transport}
    about |= {"device": options.device, "steps": options.steps, "quick": options.quick}
    measured = harness.launch(
        measure,
        ranks=options.ranks,
        transport=options.transport,
        framework=options.framework,
        device=options.device,
        on_result=lambda measured: harness.write_json(options.json, about | figures_of(measured)),
        module=f"harness.steps_{options.framework}",
        steps=options.steps,
        block=options.block,
        seconds=QUICK_SECONDS if options.quick else None,
    )
    figures = figures_of(measured)
    rows = []
    for shape_set, milliseconds in figures["milliseconds"].items():
        void = "void" if figures["void"][shape_set] else ""
        for name, ratio in figures[shape_set].items():
            counted = figures["counts"][shape_set].get(name)
            told = [f"{counted['rounds by step']:.2f}", f"{counted['missing']:.1%}"] if counted else ["", ""]
            rows.append([shape_set, name, f"{milliseconds[name]:.2f}", *ratios.shown(ratio), *told, void])
    harness.print_table(
        f"Step time without compute in {options.framework}, {options.ranks} ranks over {options.transport}",
        ["shapes", "optimizer", "ms", "over Horovod", "95 % interval", "rounds by step", "missing", ""],
        rows,
    )


def figures_of(measured: dict[str, Any]) -> dict[str, Any]:
    """The figures of the sets of shapes that have been measured."""
    figures: dict[str, Any] = {**measured, "void": {}, "milliseconds": {}}
    for shape_set, seconds in measured["seconds"].items():
        horovod = [statistics.fmean(both) for both in zip(seconds["horovod"], seconds["horovod_again"], strict=True)]
        control = ratios.with_interval(seconds["horovod_again"], seconds["horovod"])
        ours = {name: ratios.with_interval(seconds[name], horovod) for name in OURS}
        figures[shape_set] = {"horovod_again": control, **ours}
        figures["void"][shape_set] = not control["low"] <= 1 <= control["high"]
        figures["milliseconds"][shape_set] = {name: 1e3 * statistics.median(of) for name, of in seconds.items()}
    return figures


if __name__ == "__main__":
    main()
