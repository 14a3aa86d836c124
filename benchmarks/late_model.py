"""Which way of not waiting pays, for which optimizer: rounds in simulated time, with a Transformer that learns from them.

    .venv/bin/python benchmarks/late_model.py [--arms "adam, solo" "muon, solo"] [--seeds 5] [--results FILE]

The program is examples/torch/work/transformer.py, in one process. The simulator drives the coordinator of a real job: it tells
which gradient is in which round, and from which round's model it was computed. A batch takes as long as its padded words
do on one core. Messages take no time. So a figure does not depend on the load of the machine.

Each arm is an optimizer, a policy, a way to draw batches, and perhaps a correction of late gradients. It is tuned over a
grid of rates with one seed, and then runs with other seeds. Full takes fewer steps, too, each time with a schedule of that
length and the rate of the whole length. `time` is over that of Full with the same optimizer. `ahead` is by how many percent the
perplexity of an arm is below that of Full in the same time, with the same optimizer. Runs are appended to `--results`, and those
that are there are not made again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from horovod_partial.insight.simulate import Cluster, Trace, simulate
from horovod_partial.policies import resolve

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "torch" / "work"
sys.path.insert(0, str(FOLDER))

import job
import transformer

RANKS, STEPS, TUNING_SEED = 4, 600, 100
MAX_STALENESS = 8  # the default of the policies
# Milliseconds of a forward and a backward pass: of any batch, and of each of its words, with padding; on one core.
BATCH_MS, WORD_MS = 0.44, 0.02
CORRECTION = 30.0  # not tuned
RATES = (0.005, 0.01, 0.02, 0.04, 0.08)

Sentences = list[torch.Tensor]
Floats = NDArray[np.float64]
Vector = torch.Tensor


class Rounds(NamedTuple):
    """Which gradients rounds have, and when they close.

    Attributes:
        round_of: the round, from 0, that each gradient is in, of the shape (steps, ranks).
        model_of: after how many rounds the model was, with which it was computed; of the same shape.
        seconds: until all rounds are over.
    """

    round_of: NDArray[np.int64]
    model_of: NDArray[np.int64]
    seconds: float


@dataclass(frozen=True)
class Arm:
    """What is compared.

    Attributes:
        policy: its text.
        full: share of the steps that are taken under Full before that.
        steps: share of those of the program.
        optimizer: of `transformer.OPTIMIZERS`.
        batches: of `BATCHES`.
        late: of `CORRECTIONS`.
    """

    policy: str = "full"
    full: float = 0.0
    steps: float = 1.0
    optimizer: str = "adam"
    batches: str = "own"
    late: str = "none"


SHARES = (1.0, 0.85, 0.7, 0.55)  # of the steps, under Full
ARMS = {
    f"{name}, full {share:g}": Arm(steps=share, optimizer=name) for name in transformer.OPTIMIZERS for share in SHARES
}
ARMS |= {f"adam, {policy}": Arm(policy) for policy in ("solo", "majority", "quorum:0.75", "auto")}
ARMS |= {f"muon, {policy}": Arm(policy, optimizer="muon") for policy in ("solo", "majority", "quorum:0.75")}
ARMS |= {
    "adam, balanced": Arm(batches="balanced"),
    "adam, balanced, mixed": Arm(batches="mixed"),
    "adam, as many words": Arm(batches="words"),
    "adam, full until 15%, majority": Arm("majority", full=0.15),
    "adam, full until 40%, solo": Arm("solo", full=0.4),
    "adam, solo, corrected": Arm("solo", late="corrected"),
    "adam, solo, late ones smaller": Arm("solo", late="smaller"),
    "adam, solo, late ones dropped": Arm("solo", late="dropped"),
    "adam, majority, corrected": Arm("majority", late="corrected"),
}


# --- Batches: steps and ranks to sentences ---------------------------------------------------------------------------


def own_batches(training: Sentences, steps: int, seed: int) -> list[list[Sentences]]:
    """As the program has them: each rank goes through its own share."""
    of_ranks = [
        transformer.draw(training[rank::RANKS], transformer.BATCH, steps, 1000 * (seed + 1) + rank)
        for rank in range(RANKS)
    ]
    return [list(step) for step in zip(*of_ranks, strict=True)]


def balanced_batches(training: Sentences, steps: int, seed: int) -> list[list[Sentences]]:
    """In each step all ranks have neighbours in one list by length."""
    drawn = transformer.draw(training, transformer.BATCH * RANKS, steps, 1000 * (seed + 1))
    return [[batch[rank::RANKS] for rank in range(RANKS)] for batch in drawn]


def mixed_batches(training: Sentences, steps: int, seed: int) -> list[list[Sentences]]:
    """Balanced batches, with one from each quarter of the lengths in four consecutive steps."""
    drawn = balanced_batches(training, steps, seed)
    by_length = sorted(range(steps), key=lambda step: max(map(len, drawn[step][0])))
    order = np.random.default_rng(seed).permuted(np.array(by_length).reshape(4, -1), axis=1)
    return [drawn[step] for step in order.T.flat]


def as_many_words(training: Sentences, steps: int, seed: int) -> list[list[Sentences]]:
    """A batch has so many sentences that it has about as many words, with padding, as any other."""
    most = transformer.BATCH * sum(map(len, training)) / len(training)
    generator = torch.Generator().manual_seed(1000 * (seed + 1))

    def epoch() -> list[Sentences]:
        batches: list[Sentences] = [[]]
        shuffled = [training[i] for i in torch.randperm(len(training), generator=generator)]
        for sentence in sorted(shuffled, key=len):
            if (len(batches[-1]) + 1) * len(sentence) > most and batches[-1]:
                batches.append([])
            batches[-1].append(sentence)
        return batches

    drawn = list(job.draw(epoch, steps * RANKS, generator))
    return [drawn[step * RANKS : (step + 1) * RANKS] for step in range(steps)]


BATCHES: dict[str, Callable[[Sentences, int, int], list[list[Sentences]]]] = {
    "own": own_batches,
    "balanced": balanced_batches,
    "mixed": mixed_batches,
    "words": as_many_words,
}


# --- Rounds ----------------------------------------------------------------------------------------------------------


def seconds_of(batch: Sentences) -> float:
    return 1e-3 * (BATCH_MS + WORD_MS * len(batch) * max(map(len, batch)))


def rounds_of(policy: str, seconds: Floats) -> Rounds:
    """What the coordinator decides where a step of a rank takes so long."""
    steps, ranks = seconds.shape
    if policy == "full":
        numbers = np.repeat(np.arange(steps)[:, None], ranks, axis=1)
        return Rounds(numbers, numbers, float(seconds.max(axis=1).sum()))
    least = seconds.min() / 2
    result = simulate(
        Trace.even(1, 4, least / 2, least / 2),
        resolve(policy, policy),
        ranks,
        cluster=Cluster(0.0, 0.0),
        iterations=steps,
        delays=seconds - least,
        cycle=0.0,
    )
    began = np.vstack([np.zeros(ranks), result.ends[:-1]])
    tick = 1e-7  # of rounding
    round_of = np.searchsorted(result.closed, began + seconds - tick)
    model_of = np.searchsorted(result.closed, began + tick, side="right")
    return Rounds(round_of, np.minimum(model_of, round_of), float(result.ends.max()))


def in_two(first: Rounds, second: Rounds) -> Rounds:
    """One after the other, with a flush between them."""
    after = int(first.round_of.max()) + 1
    return Rounds(
        np.vstack([first.round_of, second.round_of + after]),
        np.vstack([first.model_of, second.model_of + after]),
        first.seconds + second.seconds,
    )


# --- Corrections -----------------------------------------------------------------------------------------------------


# A late gradient, the model that it was computed with, the newest one, and by how many rounds it is late.
CORRECTIONS: dict[str, Callable[[Vector, Vector, Vector, int], Vector]] = {
    "none": lambda gradient, then, now, late: gradient,
    # By what the model has moved since, as in DC-ASGD (arXiv 1609.08326), with |g| in place of its square.
    "corrected": lambda gradient, then, now, late: gradient + CORRECTION * gradient.abs() * (now - then),
    # By the staleness (Zhang et al., IJCAI'16).
    "smaller": lambda gradient, then, now, late: gradient / (1 + late),
    # Ringmaster (arXiv 2501.16168), with a bound of 0 rounds.
    "dropped": lambda gradient, then, now, late: gradient if late == 0 else torch.zeros_like(gradient),
}


# --- Training --------------------------------------------------------------------------------------------------------


class Trainer:
    """Replays rounds: one model, since all ranks have the same one after a round."""

    def __init__(self, arm: Arm, rate: float, steps: int, words_of_batch: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = transformer.LanguageModel()
        self._parameters = list(self.model.parameters())
        self._words = words_of_batch
        self._correct = CORRECTIONS[arm.late]
        self._optimizer = transformer.optimizer_of(arm.optimizer, self.model, rate)
        self._rate, self._factor = rate, job.cosine(steps, transformer.WARM_UP)
        self._models = {0: parameters_to_vector(self._parameters).detach().clone()}
        self._delivered = 0

    def train(self, batches: list[list[Sentences]], rounds: Rounds) -> None:
        members = defaultdict(list)
        for step, rank in np.ndindex(rounds.round_of.shape):
            members[int(rounds.round_of[step, rank])].append((int(rounds.model_of[step, rank]), step, rank))
        for number in range(max(members) + 1):
            self._round(number, sorted(members[number]), batches)

    def _round(self, number: int, members: list[tuple[int, int, int]], batches: list[list[Sentences]]) -> None:
        now, total = self._models[number], torch.zeros_like(self._models[number])
        for of, step, rank in members:
            then = self._models[of]
            gradient = self._gradient(then, batches[step][rank])
            total += self._correct(gradient, then, now, number - of)
        self._apply(now, total / RANKS)
        self._delivered += len(members)
        self._models[number + 1] = parameters_to_vector(self._parameters).detach().clone()
        self._models.pop(number - 4 * MAX_STALENESS, None)

    def _gradient(self, model: Vector, batch: Sentences) -> Vector:
        vector_to_parameters(model, self._parameters)
        self.model.zero_grad()
        (self.model.loss(batch)[0] / self._words).backward()
        return torch.cat([p.grad.flatten() for p in self._parameters if p.grad is not None])

    def _apply(self, model: Vector, gradient: Vector) -> None:
        # The parameters become views of this copy: a late gradient still needs the model as it is.
        vector_to_parameters(model.clone(), self._parameters)
        begin = 0
        for parameter in self._parameters:
            parameter.grad = gradient[begin : begin + parameter.numel()].view_as(parameter).clone()
            begin += parameter.numel()
        clip_grad_norm_(self._parameters, transformer.LARGEST_NORM)
        # A schedule goes on by as much of a step as a round has gradients, as that of the wrapped optimizer.
        rate = self._rate * self._factor(self._delivered / RANKS)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def perplexity(self, held_out: Sentences) -> float:
        with torch.no_grad():
            losses, words = zip(*map(self.model.loss, transformer.similar(held_out)), strict=True)
        return job.perplexity(float(sum(losses)) / sum(words))


def run(name: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Train an arm."""
    torch.set_num_threads(1)
    arm = ARMS[name]
    steps = round(steps * arm.steps)
    sentences = transformer.read()
    order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = [sentences[i] for i in order[: transformer.HELD_OUT]]
    batches = BATCHES[arm.batches]([sentences[i] for i in order[transformer.HELD_OUT :]], steps, seed)
    seconds = np.array([[seconds_of(batch) for batch in step] for step in batches])
    first = round(arm.full * steps)
    rounds = rounds_of(arm.policy, seconds[first:])
    if first:
        rounds = in_two(rounds_of("full", seconds[:first]), rounds)
    trainer = Trainer(arm, rate, steps, transformer.BATCH * sum(map(len, sentences)) / len(sentences), seed)
    trainer.train(batches, rounds)
    return {
        "perplexity": trainer.perplexity(held_out),
        "seconds": rounds.seconds,
        "late": float((rounds.round_of > rounds.model_of).mean()),
    }


# --- Figures ---------------------------------------------------------------------------------------------------------


class Runs:
    """Runs, of which each is made once."""

    def __init__(self, results: Path, steps: int, processes: int) -> None:
        self._results, self._steps, self._processes = results, steps, processes
        texts = [Path(__file__).read_text().partition("# --- Figures")[0]]
        texts += [(FOLDER / f"{name}.py").read_text() for name in ("transformer", "job")]
        self._source = hashlib.sha256("".join(texts).encode()).hexdigest()[:12]  # another program has other runs

    def make(self, wanted: Sequence[tuple[str, float, int]]) -> list[dict[str, Any]]:
        """Runs of arms, rates and seeds."""
        known = self._known()
        missing = [key for key in wanted if key not in known]
        with ProcessPoolExecutor(self._processes) as pool:
            made = [(key, pool.submit(run, *key, self._steps)) for key in missing]
            for number, (key, future) in enumerate(made):
                harness.progress(f"{key[0]}, rate {key[1]:g}, seed {key[2]}", number, len(made))
                known[key] = future.result()
                self._write(key, known[key])
        return [known[key] for key in wanted]

    def _write(self, key: tuple[str, float, int], found: dict[str, Any]) -> None:
        self._results.parent.mkdir(parents=True, exist_ok=True)
        record = {"source": self._source, "steps": self._steps, "key": key, "run": found}
        with self._results.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _known(self) -> dict[tuple[str, float, int], dict[str, Any]]:
        lines = self._results.read_text().splitlines() if self._results.exists() else []
        records = [json.loads(line) for line in lines]
        same = lambda record: (record["source"], record["steps"]) == (self._source, self._steps)
        return {tuple(record["key"]): record["run"] for record in records if same(record)}


def summary(arm: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Figures of an arm over all seeds, beside Full with the same optimizer."""
    of_lengths = [runs[f"{ARMS[arm].optimizer}, full {share:g}"] for share in SHARES]
    ahead, ahead_error = harness.ahead_in_time(
        points(runs[arm]),
        list(zip(*map(points, of_lengths), strict=True)),
        lambda mine, full: 100 * (1 - mine / full),
    )
    return {
        "perplexity": statistics.fmean(mine["perplexity"] for mine in runs[arm]),
        "deviation": harness.deviation([mine["perplexity"] for mine in runs[arm]]),
        "time": statistics.fmean(
            mine["seconds"] / of["seconds"] for mine, of in zip(runs[arm], of_lengths[0], strict=True)
        ),
        "late": statistics.fmean(mine["late"] for mine in runs[arm]),
        "ahead": ahead,
        "ahead_error": ahead_error,
    }


def points(runs: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(run["seconds"], run["perplexity"]) for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", help="; ".join(ARMS).replace("%", "%%"))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="the grid")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each arm at its best rate")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each rank under Full")
    parser.add_argument("--processes", type=int, default=2, help="at the same time")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "late_model.jsonl", help="file of all runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    asked = options.arms or ARMS
    used = [name for name in transformer.OPTIMIZERS if any(ARMS[arm].optimizer == name for arm in asked)]
    full = [f"{name}, full {share:g}" for name in used for share in SHARES]
    arms = full + [arm for arm in asked if arm not in full]
    tuned_as = {arm: f"{ARMS[arm].optimizer}, full 1" if arm in full else arm for arm in arms}
    runs = Runs(options.results, options.steps, options.processes)
    grid = list(itertools.product(dict.fromkeys(tuned_as.values()), options.rates, [TUNING_SEED]))
    tuning = dict(zip(grid, runs.make(grid), strict=True))
    perplexity = lambda arm, rate: tuning[arm, rate, TUNING_SEED]["perplexity"]
    best = {arm: min(options.rates, key=lambda rate: perplexity(tuned_as[arm], rate)) for arm in arms}
    wanted = [(arm, best[arm], seed) for seed in range(options.seeds) for arm in arms]
    found = dict(zip(wanted, runs.make(wanted), strict=True))
    by_arm = {arm: [found[arm, best[arm], seed] for seed in range(options.seeds)] for arm in arms}
    figures = {arm: summary(arm, by_arm) | {"rate": best[arm]} for arm in arms}
    harness.print_table(
        f"{RANKS} ranks, {options.steps} steps, {options.seeds} seeds",
        ["arm", "rate", "time", "late", "perplexity", "ahead of Full in that time, %"],
        [
            [
                arm,
                f"{row['rate']:g}",
                f"{row['time']:.3f}",
                f"{row['late']:.0%}",
                f"{row['perplexity']:.2f} ± {row['deviation']:.2f}",
                "" if row["ahead"] is None else f"{row['ahead']:+.1f} ± {row['ahead_error']:.1f}",
            ]
            for arm, row in figures.items()
        ],
    )
    edges = [arm for arm in arms if best[arm] in (min(options.rates), max(options.rates))]
    if edges:
        print(f"The best rate is the first or the last of the grid for {'; '.join(edges)}.")
    harness.write_json(options.json, {"steps": options.steps, "seeds": options.seeds, "arms": figures})


if __name__ == "__main__":
    main()
