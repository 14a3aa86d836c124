"""Does `horovod-partial advise` tell the truth? The time to finish a program that it predicts, against the measured one.

    .venv/bin/python benchmarks/advise.py [--json FILE] [--transport gloo] [--base 0.05] [--steps 32]

Ten kinds of delays, and the steps of two production jobs (harness/scenarios.py). A step is a sleep and a small backward,
and each rank takes the same number of steps. The ranks train under Full, recorded, and then as each line of the advice says:
under each policy, and under Full with other batches. So they have the same sleeps, or those of other batches. Under work
sharing a step is divided into micro-batches, and each sleeps its part of what its rank sleeps in that step. What a
micro-batch takes besides is measured first, and told to the prediction. One program more, under Majority, counts rounds.

The time to finish is that of the rank that takes its last step last. The first step is not slow, and does not count: a
recording cannot tell how long it took. Nor does the flush at the end. The sleeps leave the processor to the other ranks;
the rest of a step does not, so with more ranks than cores `--base` must be long against that.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
from harness import scenarios

from horovod_partial.insight import recording
from horovod_partial.insight.advice import advise, gradient_policies
from horovod_partial.insight.advice.predictions import PASSES, model_policies

BY_ROUNDS = "majority, by rounds"


class Program(NamedTuple):
    """What the ranks run: how long they sleep in each step, of the shape (steps, ranks), and how they combine gradients."""

    scenario: str
    arm: str
    policy: str
    passes: int
    sleeps: list[list[float]]


def measure(folder: str, programs: list[Any], base: float) -> tuple[list[list[float]], float]:
    """On every rank: the seconds of each rank for its steps, by program; and what a micro-batch takes besides its sleep."""
    import torch

    import horovod_partial.torch as hvd
    from horovod_partial.torch.operations import runtime

    def of_ranks(seconds: float) -> list[float]:
        gathered: list[float] = hvd.allgather(torch.tensor([seconds], dtype=torch.float64)).tolist()
        return gathered

    def made(policy: str, passes: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        named = model.named_parameters()
        return model, hvd.DistributedOptimizer(optimizer, named, sync=policy, backward_passes_per_step=passes)

    def seconds_besides() -> float:
        passes, sleep = 200, base / 8
        model, wrapped = made("full", passes)
        rows = torch.randn(4, 64)
        hvd.barrier()
        start = time.perf_counter()
        for _ in range(passes):
            time.sleep(sleep)
            model(rows).square().mean().backward()
        took = time.perf_counter() - start
        wrapped.step()
        return statistics.fmean(of_ranks(took / passes - sleep))

    def train(sleeps: list[float], policy: str, passes: int = 1, counts_rounds: bool = False) -> list[float]:
        model, wrapped = made(policy, passes)
        rounds: list[float] = []
        if counts_rounds:
            wrapped.register_round_hook(lambda optimizer: rounds.append(optimizer.steps_in_round))
        rows = torch.randn(4, 64)
        hvd.barrier()
        taken, start = 0, 0.0
        while (sum(rounds) if counts_rounds else taken) < len(sleeps) + 1 - 1e-6:
            if taken and not start:
                start = time.perf_counter()
            time.sleep((sleeps[(taken - 1) % len(sleeps)] if taken else base) / passes)
            wrapped.zero_grad()
            model(rows).square().mean().backward()
            wrapped.step()
            taken += wrapped.updated if passes > 1 else 1
        took = time.perf_counter() - start
        wrapped.flush()
        return of_ranks(took)

    split = seconds_besides()
    train([base] * 3, "solo")  # what a first step costs
    seconds = []
    for number, (scenario, arm, policy, passes, sleeps) in enumerate(programs):
        harness.progress("advise", number, len(programs))
        if arm == "full":
            hvd.record(Path(folder) / scenario)
        seconds.append(train([step[hvd.rank()] for step in sleeps], policy, passes, arm == BY_ROUNDS))
        if arm == "full":
            hvd.barrier()
            runtime.core.end_recording()
    return seconds, split


def with_other_batches(sleeps: np.ndarray[Any, Any], shares: dict[int, float]) -> np.ndarray[Any, Any]:
    """The sleeps where slow ranks have smaller batches, or all ranks have samples of like length in a step."""
    if shares:
        return sleeps * list(shares.values())
    return np.random.default_rng(0).permutation(np.sort(sleeps, axis=None).reshape(sleeps.shape))


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4)
    parser.add_argument("--steps", type=int, default=32, help="of each program, on each rank")
    parser.add_argument("--base", type=float, default=0.05, help="seconds of a step that is not slow")
    parser.add_argument("--seed", type=int, default=0, help="of the scenarios")
    names = [*scenarios.SCENARIOS, *scenarios.RECORDED]
    parser.add_argument("--scenarios", nargs="*", default=names, choices=names, help="one_worker_slowed has 4 ranks")
    options = parser.parse_args()

    arms = [(policy, policy, 1) for policy in gradient_policies(options.ranks)]
    arms += [(f"work_sharing, K = {passes}", "work_sharing", passes) for passes in PASSES]
    arms += [(policy, policy, 1) for policy in model_policies(options.ranks)]
    arms += [(BY_ROUNDS, "majority", 1)]
    sleeps = {
        name: scenarios.draw(name, steps=options.steps, ranks=options.ranks, base=options.base, seed=options.seed)
        for name in options.scenarios
    }
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in sleeps}

    def run(programs: list[Program]) -> float:
        """Add what was measured of the programs. Returns what a micro-batch takes besides its sleep, in seconds."""
        launching = {"ranks": options.ranks, "transport": options.transport, "timeout": 3600.0}
        seconds, split = harness.launch(measure, **launching, folder=folder, programs=programs, base=options.base)
        for program, of_ranks in zip(programs, seconds, strict=True):
            measured[program.scenario][program.arm] = of_ranks
        return float(split)

    with tempfile.TemporaryDirectory(prefix="advise-") as folder:
        split = run([Program(name, *arm, sleeps[name].tolist()) for name in sleeps for arm in arms])
        advice = {name: advise(recording.load(Path(folder) / name), split=split, anyway=True) for name in sleeps}
        others = [(name, one) for name in sleeps for one in advice[name].predictions if one.batches]
        run(
            [
                Program(name, str(one), "full", 1, with_other_batches(sleeps[name], advice[name].shares).tolist())
                for name, one in others
            ]
        )
    figures: dict[str, Any] = {"ranks": options.ranks, "transport": options.transport, "split": split}
    figures |= {"seed": options.seed, "steps": options.steps, "base": options.base, "scenarios": {}}
    rows = []
    for name, of_arms in measured.items():
        found = {str(one): one for one in advice[name].predictions}
        predicted = {arm: one.seconds * options.steps for arm, one in found.items()}
        predicted[BY_ROUNDS] = options.steps / found["majority"].rate
        seconds = {arm: max(of_ranks) for arm, of_ranks in of_arms.items()}
        rates = {arm: statistics.fmean(1 / one for one in of_ranks) for arm, of_ranks in of_arms.items()}
        ratios = {arm: predicted[arm] / took for arm, took in seconds.items()}
        choices = [arm for arm, policy, _ in arms if arm != BY_ROUNDS and policy not in model_policies(options.ranks)]
        best = min(choices, key=lambda arm: seconds[arm])
        chosen = str(advice[name].chosen)
        figures["scenarios"][name] = {
            "measured": seconds,
            "predicted": predicted,
            "predicted_over_measured": ratios,
            "over_full": {arm: rate / rates["full"] for arm, rate in rates.items()},  # of steps of all ranks per second
            "speed_up": {arm: seconds["full"] / took for arm, took in seconds.items()},
            "predicted_speed_up": {arm: predicted["full"] / took for arm, took in predicted.items()},
            "chosen": chosen,
            "loss": seconds[chosen] / seconds[best] - 1,
        }
        for arm, took in seconds.items():
            speed_ups = f"{seconds['full'] / took:.2f}", f"{predicted['full'] / predicted[arm]:.2f}"
            mark = "chosen" if arm == chosen else "best" if arm == best else ""
            rows.append([name, arm, f"{took:.2f}", *speed_ups, f"{ratios[arm]:.2f}", mark])
    harness.print_table(
        f"Time to finish {options.steps} steps on each of {options.ranks} ranks over {options.transport}",
        ["scenario", "advice", "s", "speed-up", "predicted", "predicted s / s", ""],
        rows,
    )
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
