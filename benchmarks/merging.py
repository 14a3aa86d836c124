"""Merged gradients (MG-WFBP): steps under the plans of `hvd.MergedGradients`, against Horovod's own fusion.

    .venv/bin/python benchmarks/merging.py [--sections small links] [--json FILE]

small    200 tensors of 1 to 8 KiB, 0.15 ms of backward for each, on one machine.
links    ResNet-50's shapes and 2 s of backward in proportion to what each layer computes, ranks in network namespaces of
         their own, on links of 200 Mbit/s; over MPI, needs root, `ip` and `tc`.

Backward sleeps (harness/shaped.py), so that ranks do not compete for cores. Arms are Horovod's optimizer with its
default fusion, and without any (a message for each tensor, HOROVOD_FUSION_THRESHOLD=0), and ours under Full with three
rules. Horovod reads that variable when it starts, so every arm is a job of its own; jobs take turns. A figure is the
median over the steps of all jobs of an arm, of means over the ranks. The plan is printed, with its prediction.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any

import harness
import horovod.torch
import torch
from harness import namespaces, shapes
from harness.shaped import Shaped

import horovod_partial.torch as hvd

MEGABITS = 200
BACKWARD = {"small": 0.03, "links": 2.0}  # seconds
RULES = {"exact": "exact", "paper": "paper", "single message": "single"}
ARMS: dict[str, dict[str, str]] = {
    "horovod": {},
    "per tensor": {"HOROVOD_FUSION_THRESHOLD": "0"},
    **{name: {} for name in RULES},
}


def make_layers(section: str) -> Shaped:
    if section == "small":
        sizes: list[tuple[int, ...]] = [(256 * (1 + index % 8),) for index in range(200)]
        return Shaped(sizes, [BACKWARD[section] / len(sizes)] * len(sizes))
    flops = shapes.resnet50_flops()
    return Shaped(shapes.resnet50(), [BACKWARD[section] * share / sum(flops) for share in flops])


def run(section: str, arm: str, steps: int, warmup_steps: int) -> dict[str, Any]:
    """On every rank: seconds of steps, means over the ranks, and what the plan says of itself."""
    layers = make_layers(section)
    named = [(str(index), parameter) for index, parameter in enumerate(layers.parameters)]
    sgd = torch.optim.SGD(layers.parameters, lr=1e-3)
    if arm in RULES:
        merging = hvd.MergedGradients(RULES[arm], warmup_steps=warmup_steps, replan_every=None)
        optimizer: Any = hvd.DistributedOptimizer(sgd, named, sync=hvd.Full(), merging=merging)
    else:
        optimizer = horovod.torch.DistributedOptimizer(sgd, named)
    seconds = []
    unmeasured = warmup_steps + 3  # the plan is made, and its first step is over
    for step in range(unmeasured + steps):
        harness.progress(f"{section}, {arm}", step, unmeasured + steps)
        start = time.perf_counter()
        optimizer.zero_grad()
        layers.backward()
        optimizer.step()
        if step >= unmeasured:
            seconds.append(time.perf_counter() - start)
    means = hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), name="seconds").tolist()
    plan = optimizer.merging_plan if arm in RULES else None
    return {
        "seconds": means,
        "plan": str(plan) if plan else "",
        "predicted": plan.predicted if plan else None,
        "messages": len(plan.messages) if plan else None,
    }


def report(section: str, options: argparse.Namespace) -> dict[str, Any]:
    if section == "links" and (reason := namespaces.missing()):
        print(f"No limited links: {reason}")
        return {"skipped": reason}
    steps, warmup_steps = (options.steps, 10) if section == "small" else (max(2, options.steps // 6), 3)
    jobs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for repeat in range(options.repeats):
        for arm in sorted(ARMS, key=list(ARMS).index, reverse=repeat % 2 == 1):
            links: Any = namespaces.limited_links(options.ranks, MEGABITS) if section == "links" else nullcontext()
            with links as command:
                jobs[arm].append(
                    harness.launch(
                        run,
                        ranks=options.ranks,
                        transport="mpi" if section == "links" else options.transport,
                        environment=ARMS[arm],
                        command=command,
                        section=section,
                        arm=arm,
                        steps=steps,
                        warmup_steps=warmup_steps,
                    )
                )
    medians = {arm: statistics.median(s for job in done for s in job["seconds"]) for arm, done in jobs.items()}
    others = [medians[arm] for arm in ("horovod", "per tensor", "single message")]
    rows = []
    for arm, median in medians.items():
        last = jobs[arm][-1]
        predicted = "" if last["predicted"] is None else f"{1e3 * last['predicted']:.1f}"
        messages = "" if last["messages"] is None else str(last["messages"])
        rows.append([arm, f"{1e3 * median:.1f}", f"{median / min(others):.3f}", predicted, messages])
    harness.print_table(
        f"{section}: step time, {options.ranks} ranks, backward of {BACKWARD[section]:g} s",
        ["arm", "ms", "over the best other", "predicted ms", "messages"],
        rows,
    )
    for arm in RULES:
        print(f"{arm}: {jobs[arm][-1]['plan']}")
    return {
        "seconds": medians,
        "exact_over_best": medians["exact"] / min(others),
        "worst_over_exact": max(others) / medians["exact"],
        "predicted": {arm: [job["predicted"] for job in jobs[arm]] for arm in RULES},
    }


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4)
    parser.add_argument("--sections", nargs="+", choices=list(BACKWARD), default=list(BACKWARD), help="what to measure")
    parser.add_argument("--steps", type=int, default=30, help="of each job; a sixth of it on limited links")
    parser.add_argument("--repeats", type=int, default=2, help="jobs of each arm")
    options = parser.parse_args()
    figures: dict[str, Any] = {"ranks": options.ranks, "transport": options.transport}
    for section in options.sections:
        figures[section] = report(section, options)
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
