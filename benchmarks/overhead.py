"""What a step costs where nobody is slow: ours against Horovod's own, without any compute.

    .venv/bin/python benchmarks/overhead.py [--framework tensorflow] [--device cuda] [--json FILE] [--transport gloo]

Every arm has its own copy of the parameters, and its gradients come from a backward that does next to nothing. In
PyTorch all are optimizers; in TensorFlow ours are optimizers of Keras in the step of `model.fit`, and Horovod's is its
tape (harness/steps_*.py). The arms take turns in blocks of a few steps, in one order and then in the other, behind a
barrier. Horovod is there twice: where its two arms differ by more than 2 % the figures mean nothing. A ratio is that of
an arm's median to the median of both of them.
"""

from __future__ import annotations

import importlib
import statistics
import time
from typing import Any

import harness
from harness import shapes

WARM_UP = 2  # blocks of each arm
VALID = (0.98, 1.02)  # for Horovod against Horovod


def measure(module: str, steps: int, block: int) -> dict[str, dict[str, list[float]]]:
    """On every rank: for each set of shapes what `alternate` returns."""
    return {shape_set: alternate(module, shape_set, steps, block) for shape_set in shapes.SETS}


def alternate(module: str, shape_set: str, steps: int, block: int) -> dict[str, list[float]]:
    """The mean seconds of a step in each block of each arm; means over the ranks."""
    own = importlib.import_module(module)
    arms = own.make_steps(shape_set, shapes.SETS[shape_set]())
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    blocks = WARM_UP + -(-steps // block)
    for index in range(blocks):
        harness.progress(f"overhead, {shape_set}", index, blocks)
        for name in sorted(arms, key=list(arms).index, reverse=index % 2 == 1):
            own.barrier()
            start = time.perf_counter()
            for _ in range(block):
                arms[name]()
            own.finish()
            if index >= WARM_UP:
                seconds[name].append((time.perf_counter() - start) / block)
    means = own.mean_over_ranks(list(seconds.values()), f"{shape_set}.seconds")
    return dict(zip(seconds, means, strict=True))


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4, device=True)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="whose optimizers")
    parser.add_argument("--steps", type=int, default=200, help="of each arm")
    parser.add_argument("--block", type=int, default=4, help="steps that an arm takes in a row")
    options = parser.parse_args()
    if options.framework != "torch" and options.device != "cpu":
        parser.error("--device is for --framework torch")

    framework = options.framework
    measured = harness.launch(
        measure,
        ranks=options.ranks,
        transport=options.transport,
        framework=framework,
        device=options.device,
        module=f"harness.steps_{framework}",
        steps=options.steps,
        block=options.block,
    )
    figures: dict[str, Any] = {"framework": framework, "ranks": options.ranks, "transport": options.transport}
    figures |= {"device": options.device, "steps": options.steps}
    figures |= {"horovod_over_horovod": {}, "void": {}, "milliseconds": {}}
    rows = []
    for shape_set, seconds in measured.items():
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        horovod_median = statistics.median(seconds["horovod"] + seconds["horovod_again"])
        control = medians["horovod_again"] / medians["horovod"]
        void = not VALID[0] <= control <= VALID[1]
        figures[shape_set] = {name: medians[name] / horovod_median for name in ("full", "majority", "solo")}
        figures["horovod_over_horovod"][shape_set] = control
        figures["void"][shape_set] = void
        figures["milliseconds"][shape_set] = {name: 1e3 * median for name, median in medians.items()}
        for name, median in medians.items():
            ratio = f"{median / horovod_median:.3f}"
            rows.append([shape_set, name, f"{1e3 * median:.2f}", ratio, "void" if void else ""])
    harness.print_table(
        f"Step time without compute in {framework}, {options.ranks} ranks over {options.transport}",
        ["shapes", "optimizer", "ms", "over Horovod", ""],
        rows,
    )
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
