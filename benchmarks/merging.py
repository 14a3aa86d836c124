"""Merged gradients (MG-WFBP): steps under the plans of `hvd.MergedGradients`, against Horovod's own fusion.

    .venv/bin/python benchmarks/merging.py [--sections small links200 links1000] [--json FILE]

small       200 tensors of 1 to 8 KiB, 0.15 ms of backward for each, on one machine.
links200    ResNet-50's shapes and 2 s of backward in proportion to what each layer computes, ranks in network namespaces
            of their own, on links of 200 Mbit/s; over MPI, needs root, `ip` and `tc`.
links400    The same on links of 400 Mbit/s.
links1000   The same on links of 1 Gbit/s, with 1 s of backward, so that messages take about as long as backward.

Backward sleeps (harness/shaped.py), so that ranks do not compete for cores. Arms are Horovod's optimizer with its
default fusion, and without any (a message for each tensor, HOROVOD_FUSION_THRESHOLD=0), and ours under Full with three
rules, and with the fastest of the plans that it tries. Horovod reads that variable when it starts, so every arm is a job of its
own; jobs take turns. A figure is the median over the steps of all jobs of an arm, of means over the ranks. The plan is printed,
with its prediction.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import harness
import horovod.torch
import torch
from harness import namespaces, shapes
from harness.shaped import Shaped

import horovod_partial.torch as hvd

MEGABITS = {"links200": 200, "links400": 400, "links1000": 1000}
BACKWARD = {"small": 0.03, "links200": 2.0, "links400": 2.0, "links1000": 1.0}  # seconds
RULES = {"exact": "exact", "paper": "paper", "single message": "single", "measured": "measured"}
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
    """On every rank: measure steps. Returns their times, means over the ranks in seconds, and the plan."""
    layers = make_layers(section)
    named = [(str(index), parameter) for index, parameter in enumerate(layers.parameters)]
    sgd = torch.optim.SGD(layers.parameters, lr=1e-3)
    if arm in RULES:
        merging = hvd.MergedGradients(RULES[arm], warmup_steps=warmup_steps, replan_every=None)
        optimizer: Any = hvd.DistributedOptimizer(sgd, named, sync=hvd.Full(), merging=merging)
    else:
        optimizer = horovod.torch.DistributedOptimizer(sgd, named)
    seconds = []
    # The plan is made, and its first step is over; or up to four plans have been tried.
    unmeasured = (5 if arm == "measured" else 1) * (warmup_steps + 1) + 2
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
    if plan is None:
        return {"seconds": means, "plan": None}
    cost = plan.cost and [plan.cost.latency, plan.cost.seconds_per_byte, plan.cost.r_squared]
    kept = {"messages": plan.messages, "cost": cost, "reason": plan.reason, "predicted": plan.predicted}
    return {"seconds": means, "plan": kept, "text": str(plan)}


def measure(
    section: str, arms: Sequence[str], *, ranks: int, transport: harness.Transport, repeats: int, steps: int
) -> dict[str, list[dict[str, Any]]]:
    """Run `repeats` jobs of each arm, in turns, and return by arm what each job has measured.

    On limited links a job has a sixth of `steps`, because each takes seconds.
    """
    limited = section in MEGABITS
    jobs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for repeat in range(repeats):
        for arm in harness.in_turn(arms, repeat):
            links: Any = namespaces.limited_links(ranks, MEGABITS[section]) if limited else nullcontext()
            with links as command:
                done = harness.launch(
                    run,
                    ranks=ranks,
                    transport="mpi" if limited else transport,
                    environment=ARMS[arm],
                    command=command,
                    section=section,
                    arm=arm,
                    steps=max(2, steps // 6) if limited else steps,
                    warmup_steps=3 if limited else 10,
                )
            jobs[arm].append(done)
    return jobs


def median_step(jobs: Sequence[dict[str, Any]]) -> float:
    """Return the median over the steps of all jobs of an arm, in seconds."""
    return statistics.median(seconds for job in jobs for seconds in job["seconds"])


def report(section: str, options: argparse.Namespace) -> dict[str, Any]:
    if section in MEGABITS and (reason := namespaces.missing()):
        print(f"No limited links: {reason}")
        return {"skipped": reason}
    jobs = measure(
        section,
        options.arms,
        ranks=options.ranks,
        transport=options.transport,
        repeats=options.repeats,
        steps=options.steps,
    )
    medians = {arm: median_step(done) for arm, done in jobs.items()}
    best = min(medians.values())
    rows = []
    for arm, median in medians.items():
        ratios = [f"{median / other:.3f}" for other in (medians["horovod"], best)]
        plan = jobs[arm][-1]["plan"]
        predicted = f"{1e3 * plan['predicted']:.1f}" if plan and plan["predicted"] else ""
        rows.append([arm, f"{1e3 * median:.1f}", *ratios, predicted, str(len(plan["messages"])) if plan else ""])
    harness.print_table(
        f"{section}: step time, {options.ranks} ranks, backward of {BACKWARD[section]:g} s",
        ["arm", "ms", "over Horovod", "over the best", "predicted ms", "messages"],
        rows,
    )
    for arm in [arm for arm in options.arms if arm in RULES]:
        print(f"{arm}: {jobs[arm][-1]['text']}")
    return {
        "seconds": medians,
        "over_horovod": {arm: median / medians["horovod"] for arm, median in medians.items()},
        "jobs": jobs,
    }


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4)
    parser.add_argument(
        "--sections",
        nargs="+",
        choices=list(BACKWARD),
        default=["small", "links200", "links1000"],
        help="what to measure",
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="horovod must be among them")
    parser.add_argument("--steps", type=int, default=30, help="of each job; a sixth of it on limited links")
    parser.add_argument("--repeats", type=int, default=5, help="jobs of each arm")
    options = parser.parse_args()
    if "horovod" not in options.arms:
        parser.error("--arms must have horovod, over which ratios are taken")
    figures: dict[str, Any] = {"ranks": options.ranks, "transport": options.transport}
    for section in options.sections:
        figures[section] = report(section, options)
        harness.write_json(options.json, figures)  # a section takes up to half an hour


if __name__ == "__main__":
    main()
