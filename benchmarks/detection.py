"""The detector of slow ranks, against the delays that were made.

    .venv/bin/python benchmarks/detection.py [--seeds 20] [--steps 150] [--busy 2] [--json FILE]
    .venv/bin/python benchmarks/detection.py --base 0.05 --scenarios none --seeds 40 --pauses 20 [--busy 2] [--json FILE]

8 ranks train a small model with Horovod's own optimizer, and are recorded. In each step a rank asks a `DataLoader` for a
batch, computes, and steps its optimizer. It sleeps in one of these parts for as long as harness/scenarios.py says: under
ten kinds of delays in the forward pass, and otherwise while it loads a batch, or between two steps. With `--busy 2`, two
processes beside the job compute all the time. The recorded compute times and parts of each step go through the detector
of `hvd.watch()`, which is a pure function of them. The truth is which ranks had delays, when, and where:

* a rank that is slow in bursts counts as slow from its first burst until one period after its last one begins;
* a rank that grows counts as slow from 1.1 times the others on;
* a rank that pauses counts as slow from its first pause to the last one, in all steps between them;
* where all ranks have delays by chance, or each rank in another step, or all load slowly, nobody is slow.

Precision and recall are by rank and step. Delay: slow steps until a slowness is told, the one included that tells it.

`--pauses N` adds pauses of rank 0 that nobody sleeps: pauses of 1, 5 and 20 s that cost 5, 20 and 50 % of the time would
take days. N runs of each kind are made of the recorded steps of the runs without delays, drawn anew in pieces of 50 steps.
The pauses are added to them. They begin at a random step, and their periods and durations vary by 10 %.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import harness
import numpy as np
from harness import scenarios
from numpy.typing import NDArray

from horovod_partial import _core
from horovod_partial.insight import recording
from horovod_partial.insight.report import slowness

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

PASSES = {"forward", "backward"}  # both are the compute, besides its other parts
WARM_UP = 20  # steps before the first run
PIECE = 50  # steps that follow each other in a run that is drawn anew
PAUSES = {f"pauses of {length} s, {share:.0%}": (length, share) for length in (1, 5, 20) for share in (0.05, 0.2, 0.5)}
PAUSES_IN_A_RUN = 16
VARIES = 0.1
EVERY = 15  # steps between two evaluations


class Case(NamedTuple):
    """One way in which ranks are slow: the drawn delays, by the name of a scenario, and where they are: compute, loader or other."""

    drawn: str
    part: str


CASES = {name: Case(name, "compute") for name in scenarios.SCENARIOS} | {
    "slow loader on one rank": Case("one always", "loader"),
    "slow loader on all ranks": Case("none", "loader"),
    "evaluation on rank 0": Case("none", "other"),
}


def draw(name: str, steps: int, ranks: int, base: float, seed: int) -> Floats:
    """The seconds that each rank sleeps in each step, of the shape (steps, ranks)."""
    drawn = scenarios.draw(CASES[name].drawn, steps=steps, ranks=ranks, base=base, seed=seed)
    if name == "slow loader on all ranks":
        drawn *= 2.5
    if name == "evaluation on rank 0":
        drawn[seed % EVERY :: EVERY, 0] += EVERY * 2 * base
    return drawn


def truth(name: str, drawn: Floats) -> tuple[Flags, str, str]:
    """In which steps each rank is slow, of the shape (steps, ranks), in what way, and in which part of a step."""
    steps, ranks = drawn.shape
    slow = drawn > drawn.min() * 1.1
    part = CASES[name].part
    if name in ("one always", "half 1.7 times slower", "slow loader on one rank"):
        return slow, "persistent", part
    if name == "growing":
        return slow, "growing", part
    if name == "evaluation on rank 0":
        return between(slow), "pauses", part
    if name in ("bursts", "two groups"):
        period = 40 if name == "bursts" else 20
        for rank in np.flatnonzero(slow.any(axis=0)):
            begins = np.flatnonzero(np.diff(slow[:, rank], prepend=False) & slow[:, rank])
            slow[begins[0] : begins[-1] + period, rank] = True
        return slow, "bursts", part
    return np.zeros((steps, ranks), dtype=bool), "none", part


def between(slow: Flags) -> Flags:
    """The same with all steps between the first slow step of a rank and its last one."""
    from_first = np.logical_or.accumulate(slow, axis=0)
    return from_first & np.logical_or.accumulate(slow[::-1], axis=0)[::-1]


def measure(
    folder: str, names: list[str], seeds: list[int], steps: int, base: float
) -> dict[str, list[dict[str, list[Any]]]]:
    """On every rank: by case and seed the compute times, of the shape (steps, ranks), and their parts (steps, ranks, 5)."""
    import horovod.torch as hvd
    import torch
    from torch.utils.data import DataLoader, Dataset

    import horovod_partial.torch as recorder

    class Samples(Dataset[torch.Tensor]):
        """Samples that take long to load: the seconds of each."""

        def __init__(self, seconds: list[float]) -> None:
            self.seconds = seconds

        def __len__(self) -> int:
            return len(self.seconds)

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(self.seconds[index])
            return torch.ones(64)

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())

    def train(delays: Floats, part: str) -> None:
        own = delays[:, hvd.rank()].tolist()
        nothing = [0.0] * len(own)
        batches = iter(DataLoader(Samples(own if part == "loader" else nothing), batch_size=1))
        for of_forward, of_other in zip(
            own if part == "compute" else nothing, own if part == "other" else nothing, strict=True
        ):
            time.sleep(of_other)
            batch = next(batches)
            time.sleep(of_forward)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    recorder.record(folder, megabytes=1000)
    train(np.full((WARM_UP, hvd.size()), base), "compute")
    runs = [(name, seed) for name in names for seed in seeds]
    for number, (name, seed) in enumerate(runs):
        harness.progress("detection", number, len(runs))
        train(draw(name, steps, hvd.size(), base, seed), CASES[name].part)
    hvd.barrier()
    recorder.operations.runtime.core.end_recording()
    hvd.barrier()
    if hvd.rank() > 0:
        return {}
    recorded = recording.load(folder)
    found = recording.JobSteps.of(recorded, recording.Clocks.fit(recorded)).common()
    of_run: Iterator[dict[str, list[Any]]] = (
        {"compute": found.compute[rows].tolist(), "parts": found.parts[rows].tolist()}
        for rows in (
            np.searchsorted(found.ranks[0].step, WARM_UP + np.arange(number * steps, (number + 1) * steps))
            for number in range(len(runs))
        )
    )
    return {name: [next(of_run) for _ in seeds] for name in names}


def judge(times: Floats, parts: Floats | None, slow: Flags, counted: Flags, kind: str, part: str) -> dict[str, Any]:
    """What the detector tells of one run. A delay until it is told is in those of the slow steps that are `counted`."""
    ranks = times.shape[1]
    detector = _core.SlowRanks(ranks)
    told: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for step, row in enumerate(times):
        for _, news in detector.step(row):
            told[news.rank].append(step)
    reported = slowness.of_job(list(range(ranks)), times, parts)
    named = np.zeros_like(slow)
    for of in reported:
        for found in of.times:
            named[found.begin : found.end if found.end >= 0 else len(times), of.rank] = True
    of_ranks = np.flatnonzero(slow.any(axis=0)).tolist()
    first = {rank: int(np.flatnonzero(slow[:, rank])[0]) for rank in of_ranks}
    causes = ["compute" if of.cause[0] in PASSES else of.cause[0] for of in reported]
    delays = []
    for rank in of_ranks:
        after = [step for step in told[rank] if step >= first[rank]]
        delays.append(int(counted[: after[0] + 1, rank].sum()) if after else None)
    return {
        "right": int((named & slow).sum()),
        "named": int(named.sum()),
        "slow": int(slow.sum()),
        "accused": sum(bool(of.times) for of in reported),
        "kinds": [reported[rank].kind == kind for rank in of_ranks],
        "parts": [causes[rank] == part for rank in of_ranks] if parts is not None else [],
        "delays": delays,
    }


def with_pauses(runs: list[Floats], length: float, share: float, seed: int) -> tuple[Floats, Flags]:
    """The compute times of a run in which rank 0 pauses, and in which steps it does; both of the shape (steps, ranks)."""
    generator = np.random.default_rng(seed)
    usual = float(np.mean([run.max(axis=1).mean() for run in runs]))
    period = length * (1 - share) / share / usual
    steps = int(period * (PAUSES_IN_A_RUN + 1))
    pieces = []
    for _ in range(steps // PIECE + 1):
        run = runs[generator.integers(len(runs))]
        begin = generator.integers(len(run) - PIECE + 1)
        pieces.append(run[begin : begin + PIECE])
    times = np.concatenate(pieces)[:steps].copy()
    periods = period * generator.uniform(1 - VARIES, 1 + VARIES, PAUSES_IN_A_RUN)
    at = (np.cumsum(periods) - period * generator.random()).astype(int)
    times[at, 0] += length * generator.uniform(1 - VARIES, 1 + VARIES, PAUSES_IN_A_RUN)
    pauses = np.zeros(times.shape, dtype=bool)
    pauses[at, 0] = True
    return times, pauses


def summed_up(runs: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The figures of all runs of a case together. A slowness that was never told counts as told after `steps` steps."""
    right, named, slow = (sum(run[key] for run in runs) for key in ("right", "named", "slow"))
    delays = [delay if delay is not None else steps for run in runs for delay in run["delays"]]
    of_ranks = {key: [one for run in runs for one in run[key]] for key in ("kinds", "parts")}
    return {
        "precision": right / named if named else 1.0,
        "recall": right / slow if slow else 1.0,
        **{key: sum(which) / len(which) if which else None for key, which in of_ranks.items()},
        "delay": statistics.median(delays) if delays else None,
        "longest_delay": max(delays, default=None),
        "accused": sum(run["accused"] for run in runs) / len(runs),
        "runs": runs,
    }


def main() -> None:
    parser = harness.arguments(__doc__, ranks=8)
    parser.add_argument("--seeds", type=int, default=20, help="how many, from 100 on; no tuning has seen them")
    parser.add_argument("--steps", type=int, default=150, help="of a run")
    parser.add_argument("--base", type=float, default=0.01, help="seconds of a step that is not slow")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the job")
    parser.add_argument("--scenarios", nargs="*", choices=CASES, default=list(CASES), help="by name")
    parser.add_argument("--pauses", type=int, default=0, help="runs of each kind of pauses, of the steps of `none`")
    options = parser.parse_args()
    seeds = list(range(100, 100 + options.seeds))
    with harness.busy_processes(options.busy), tempfile.TemporaryDirectory(prefix="detection-") as folder:
        measured = harness.launch(
            measure,
            ranks=options.ranks,
            transport=options.transport,
            timeout=6 * 3600.0,
            asleep=True,
            folder=folder,
            names=options.scenarios,
            seeds=seeds,
            steps=options.steps,
            base=options.base,
        )
    judged: dict[str, list[dict[str, Any]]] = {}
    for name in options.scenarios:
        judged[name] = []
        for seed, run in zip(seeds, measured[name], strict=True):
            drawn = draw(name, options.steps, options.ranks, options.base, seed)
            slow, kind, part = truth(name, drawn)
            delayed = slow & (drawn > drawn.min() * 1.1)
            judged[name].append(judge(np.array(run["compute"]), np.array(run["parts"]), slow, delayed, kind, part))
    for name, (length, share) in PAUSES.items() if options.pauses else ():
        undelayed = [np.array(run["compute"]) for run in measured["none"]]
        judged[name] = []
        for seed in range(100, 100 + options.pauses):
            times, pauses = with_pauses(undelayed, length, share, seed)
            judged[name].append(judge(times, None, between(pauses), pauses, "pauses", "other"))
    judged["all"] = [run for runs in judged.values() for run in runs]
    figures: dict[str, Any] = {
        "ranks": options.ranks,
        "transport": options.transport,
        "seeds": seeds,
        "steps": options.steps,
        "base_seconds": options.base,
        "busy_processes": options.busy,
        "scenarios": {name: summed_up(runs, options.steps) for name, runs in judged.items()},
    }
    keys = {
        "precision": "precision",
        "recall": "recall",
        "kinds": "kind right",
        "parts": "part right",
        "delay": "steps until told",
        "longest_delay": "at most",
        "accused": "ranks named in a run",
    }
    harness.print_table(
        f"{options.ranks} ranks over {options.transport}, {options.seeds} runs of {options.steps} steps each, {options.busy} busy processes",
        ["delays", *keys.values()],
        [
            [name, *("" if of[key] is None else f"{of[key]:.3g}" for key in keys)]
            for name, of in figures["scenarios"].items()
        ],
    )
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
