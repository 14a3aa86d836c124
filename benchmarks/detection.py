"""The detector of slow ranks, against the delays that were made.

    .venv/bin/python benchmarks/detection.py [--seeds 20] [--steps 150] [--json FILE]

8 ranks sleep as harness/scenarios.py says, compute a little, and average 1,000 numbers under `Full()` in each step; with `--busy 2`,
two processes beside the job compute all the time. Each rank's compute time of each step goes through the detector of
`hvd.watch()`, which is a pure function of them. The truth is which ranks had delays, and when:

* a rank that is slow in bursts counts as slow from its first burst until one period after its last one begins;
* a rank that grows counts as slow from 1.1 times the others on;
* where all ranks have delays by chance, or each rank in another step, nobody is slow.

Precision and recall are by rank and step. Delay: steps from the begin of a slowness until it is told.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import harness
import numpy as np
from harness import scenarios
from numpy.typing import NDArray

from horovod_partial import _core

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def truth(name: str, drawn: Floats) -> tuple[Flags, str]:
    """In which steps each rank is slow, of the shape (steps, ranks), and in what way."""
    steps, ranks = drawn.shape
    slow = drawn > drawn.min() * 1.1
    if name in ("one always", "half 1.7 times slower"):
        return slow, "persistent"
    if name == "growing":
        return slow, "growing"
    if name in ("bursts", "two groups"):
        period = 40 if name == "bursts" else 20
        for rank in np.flatnonzero(slow.any(axis=0)):
            begins = np.flatnonzero(np.diff(slow[:, rank], prepend=False) & slow[:, rank])
            slow[begins[0] : begins[-1] + period, rank] = True
        return slow, "bursts"
    return np.zeros((steps, ranks), dtype=bool), "none"


def measure(names: list[str], seeds: list[int], steps: int, base: float) -> dict[str, list[list[list[float]]]]:
    """On every rank: by scenario and seed the compute times of all ranks, of the shape (steps, ranks), in seconds."""
    import torch

    import horovod_partial.torch as hvd

    found: dict[str, list[list[list[float]]]] = {name: [] for name in names}
    runs = [(name, seed) for name in names for seed in seeds]
    values = torch.zeros(1000)
    work = torch.rand(200, 200)
    for number, (name, seed) in enumerate(runs):
        harness.progress("detection", number, len(runs))
        drawn = scenarios.draw(name, steps=steps, ranks=hvd.size(), base=base, seed=seed)[:, hvd.rank()].tolist()
        own = []
        for seconds in drawn:
            start = time.perf_counter()
            time.sleep(seconds)
            work @ work
            own.append(time.perf_counter() - start)
            hvd.allreduce_(values, name="values")
        gathered = hvd.allgather(torch.tensor([own], dtype=torch.float64), name="times")
        found[name].append(gathered.T.tolist())
    return found


def judge(name: str, times: Floats, drawn: Floats) -> dict[str, Any]:
    """What the detector tells of one run."""
    slow, kind = truth(name, drawn)
    ranks = times.shape[1]
    detector = _core.SlowRanks(ranks)
    told: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for step, row in enumerate(times):
        for _, news in detector.step(row):
            told[news.rank].append(step)
    named = np.zeros_like(slow)
    for rank in range(ranks):
        for found in detector.found(rank):
            named[found.begin : found.end if found.end >= 0 else len(times), rank] = True
    of_ranks = np.flatnonzero(slow.any(axis=0)).tolist()
    first = {rank: int(np.flatnonzero(slow[:, rank])[0]) for rank in of_ranks}
    return {
        "right": int((named & slow).sum()),
        "named": int(named.sum()),
        "slow": int(slow.sum()),
        "accused": sum(bool(detector.found(rank)) for rank in range(ranks)),
        "kinds": [bool(detector.found(rank)) and detector.found(rank)[-1].kind == kind for rank in of_ranks],
        "delays": [
            min((step - first[rank] + 1 for step in told[rank] if step >= first[rank]), default=None)
            for rank in of_ranks
        ],
    }


def main() -> None:
    parser = harness.arguments(__doc__, ranks=8)
    parser.add_argument("--seeds", type=int, default=20, help="how many, from 100 on; no tuning has seen them")
    parser.add_argument("--steps", type=int, default=150, help="of a run")
    parser.add_argument("--base", type=float, default=0.01, help="seconds of a step that is not slow")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the job")
    parser.add_argument("--scenarios", nargs="*", default=list(scenarios.SCENARIOS), help="by name")
    options = parser.parse_args()
    seeds = list(range(100, 100 + options.seeds))
    with harness.busy_processes(options.busy):
        measured = harness.launch(
            measure,
            ranks=options.ranks,
            transport=options.transport,
            timeout=6 * 3600.0,
            asleep=True,
            names=options.scenarios,
            seeds=seeds,
            steps=options.steps,
            base=options.base,
        )
    figures: dict[str, Any] = {
        "ranks": options.ranks,
        "transport": options.transport,
        "seeds": seeds,
        "steps": options.steps,
        "base_seconds": options.base,
        "busy_processes": options.busy,
        "scenarios": {},
    }
    rows = []
    for name in [*options.scenarios, "all"]:
        if name == "all":
            runs = [run for of in figures["scenarios"].values() for run in of["runs"]]
        else:
            runs = [
                judge(
                    name,
                    np.array(times),
                    scenarios.draw(name, steps=options.steps, ranks=options.ranks, base=options.base, seed=seed),
                )
                for seed, times in zip(seeds, measured[name], strict=True)
            ]
        right, named, slow = (sum(run[key] for run in runs) for key in ("right", "named", "slow"))
        delays = [delay if delay is not None else options.steps for run in runs for delay in run["delays"]]
        kinds = [kind for run in runs for kind in run["kinds"]]
        summary = {
            "precision": right / named if named else 1.0,
            "recall": right / slow if slow else 1.0,
            "kinds": sum(kinds) / len(kinds) if kinds else 1.0,
            "delay": statistics.median(delays) if delays else 0.0,
            "accused": sum(run["accused"] for run in runs) / len(runs),
        }
        figures["scenarios"][name] = summary | {"runs": runs}
        rows.append(
            [
                name,
                *(f"{summary[key]:.3f}" for key in ("precision", "recall", "kinds")),
                f"{summary['delay']:.0f}",
                f"{summary['accused']:.2f}",
            ]
        )
    harness.print_table(
        f"{options.ranks} ranks over {options.transport}, {options.seeds} runs of {options.steps} steps each, {options.busy} busy processes",
        ["delays", "precision", "recall", "kind right", "steps until told", "ranks named in a run"],
        rows,
    )
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
