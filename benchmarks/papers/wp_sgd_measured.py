"""WP-SGD on eight real ranks of unequal speed: the methods over time, and the weighted last average against a plain one."""

from __future__ import annotations

import statistics
import time
from typing import Any

import harness
import numpy as np
import torch
import wp_sgd_nodes as nodes
from experiment import Job, Outcome, Plot, Row
from harness import digits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import horovod_partial.torch as hvd
from horovod_partial.exchange.wp_sgd import estimate_contraction

RANKS = 8
STEP = 0.002  # seconds, a sleep, of a rank at full speed


class Task:
    """What a rank trains: one row or batch in each step, from a part of the data that is its own."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, seed: int) -> None:
        """Take the first model and the data of a seed."""
        raise NotImplementedError

    def loss(self) -> torch.Tensor:
        """Of the next step."""
        raise NotImplementedError

    def held_out(self) -> float:
        """The loss on what is held out."""
        raise NotImplementedError

    @torch.no_grad()
    def held_out_with(self, parameters: torch.Tensor) -> float:
        """The same with other parameters."""
        mine = self.parameters()
        vector_to_parameters(parameters, self.model.parameters())
        loss = self.held_out()
        vector_to_parameters(mine, self.model.parameters())
        return loss

    def parameters(self) -> torch.Tensor:
        return parameters_to_vector(self.model.parameters()).detach().clone()

    def step(self, optimizer: Any, share: float) -> None:
        """Take a step, by a rank that has that share of the full speed."""
        time.sleep(STEP / share)
        optimizer.zero_grad()
        self.loss().backward()
        optimizer.step()


class Svm(Task):
    """The rows of real-sim's stand-in, with a lambda ten times as large, so that a tenth of the steps does the same."""

    regularisation = 10 * nodes.REAL_SIM.regularisation
    contraction = 1 - regularisation * nodes.REAL_SIM.rate

    def __init__(self, seed: int) -> None:
        self._dimensions, self._labels = self._tensors(nodes.PART, 1_000 * (seed + 1) + hvd.rank())
        self._tests = self._tensors(nodes.TESTS, 1_000 * (seed + 1) + 999)
        self._generator = torch.Generator().manual_seed(1_000 * (seed + 1) + hvd.rank())
        self.model = nn.EmbeddingBag(nodes.DIMENSIONS + 1, 1, mode="sum", padding_idx=nodes.DIMENSIONS)
        nn.init.constant_(self.model.weight, nodes.REAL_SIM.start)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=nodes.REAL_SIM.rate, weight_decay=self.regularisation
        )

    @staticmethod
    def _tensors(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = nodes.Rows.make(count, seed)
        return torch.from_numpy(rows.dimensions), torch.from_numpy(rows.labels).float()

    def loss(self) -> torch.Tensor:
        row = torch.randint(len(self._labels), (1,), generator=self._generator)
        return self._hinge(self._dimensions[row], self._labels[row])

    def held_out(self) -> float:
        return self._hinge(*self._tests).item()

    def _hinge(self, dimensions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (1 - labels * self.model(dimensions)[:, 0]).relu().mean()


class Digits(Task):
    """scikit-learn's digits and a small network."""

    batch, rate = 16, 0.1

    def __init__(self, seed: int) -> None:
        images, labels, test_images, test_labels = (torch.from_numpy(array) for array in digits.data())
        self._images, self._labels = images[hvd.rank() :: hvd.size()].float(), labels[hvd.rank() :: hvd.size()]
        self._tests = test_images.float(), test_labels
        self._generator = torch.Generator().manual_seed(1_000 * (seed + 1) + hvd.rank())
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, digits.HIDDEN), nn.ReLU(), nn.Linear(digits.HIDDEN, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate)

    def loss(self) -> torch.Tensor:
        chosen = torch.randint(len(self._images), (self.batch,), generator=self._generator)
        return nn.functional.cross_entropy(self.model(self._images[chosen]), self._labels[chosen])

    def held_out(self) -> float:
        images, labels = self._tests
        return nn.functional.cross_entropy(self.model(images), labels).item()


# --- The methods over time -------------------------------------------------------------------------------------------

SLOWER = 4  # times, the last rank
LOOKS = 12
PERIOD = 60  # of averages now and then
PERIODIC = "averages now and then"

Curve = list[tuple[float, float, float]]  # steps of the fastest rank or of the model, seconds, loss


def race(steps: int, seeds: int) -> dict[str, Curve]:
    """On every rank: a curve for each method, means over the seeds."""
    runs: list[dict[str, Curve]] = []
    for seed in range(seeds):
        harness.progress("methods", seed, seeds)
        runs.append({**alone(steps, seed), nodes.MINI_BATCH: mini_batch(steps, seed), PERIODIC: periodic(steps, seed)})
    return {
        method: [
            (
                statistics.fmean(run[method][look][0] for run in runs),
                statistics.fmean(run[method][look][1] for run in runs),
                statistics.fmean(run[method][look][2] for run in runs),
            )
            for look in range(len(runs[0][method]))
        ]
        for method in runs[0]
    }


def share_of(rank: int) -> float:
    """Of the full speed."""
    return 1 / SLOWER if rank == hvd.size() - 1 else 1.0


def alone(steps: int, seed: int) -> dict[str, Curve]:
    """Every rank for itself, and what averages of their models are worth, each as the only one."""
    task = Svm(seed)
    share = share_of(hvd.rank())
    kept: dict[int, tuple[float, torch.Tensor]] = {}
    every = steps // LOOKS // SLOWER
    hvd.barrier()
    start = time.perf_counter()
    for step in range(1, int(steps * share) + 1):
        task.step(task.optimizer, share)
        if step % every == 0:
            kept[step] = (time.perf_counter() - start, task.parameters())
    curves: dict[str, Curve] = {name: [] for name in (nodes.SEQUENTIAL, nodes.SIMUPARALLEL, nodes.DIRECT, nodes.WP)}
    for look in range(1, LOOKS + 1):
        taken = look * every * SLOWER  # by the fastest
        mine = int(taken * share)
        seconds, model = kept[mine]
        weighted = hvd.average(model, hvd.WeightedAverage(1, Svm.contraction), name="weighted", steps=mine)
        plain = hvd.allreduce(model, name="plain")
        begun, even = kept[taken // SLOWER]
        simuparallel = hvd.allreduce(even, name="even")
        times = hvd.allgather(torch.tensor([[seconds, begun]], dtype=torch.float64), name="times")
        all_seconds, even_seconds = times.max(dim=0).values.tolist()
        curves[nodes.SEQUENTIAL].append((taken, times[0, 0].item(), task.held_out_with(kept[mine][1])))
        curves[nodes.WP].append((taken, all_seconds, task.held_out_with(weighted)))
        curves[nodes.DIRECT].append((taken, all_seconds, task.held_out_with(plain)))
        curves[nodes.SIMUPARALLEL].append((taken // SLOWER, even_seconds, task.held_out_with(simuparallel)))
    return curves


def mini_batch(steps: int, seed: int) -> Curve:
    """All ranks average the gradients of each step, for about as long."""
    task = Svm(seed)
    optimizer: Any = hvd.DistributedOptimizer(task.optimizer, task.model.named_parameters(), sync=hvd.Full())
    every = steps // LOOKS // SLOWER
    kept: list[tuple[float, torch.Tensor]] = []
    hvd.barrier()
    start = time.perf_counter()
    for step in range(1, LOOKS * every + 1):
        task.step(optimizer, share_of(hvd.rank()))
        if step % every == 0:
            kept.append((time.perf_counter() - start, task.parameters()))
    return [(every * look, seconds, task.held_out_with(model)) for look, (seconds, model) in enumerate(kept, start=1)]


def periodic(steps: int, seed: int) -> Curve:
    """Algorithm 5 without the delays within a node: all ranks average whenever the fastest has taken so many steps."""
    task = Svm(seed)
    policy = hvd.WeightedAverage(PERIOD, Svm.contraction)
    optimizer: Any = hvd.DistributedOptimizer(task.optimizer, task.model.named_parameters(), sync=policy)
    kept: list[tuple[float, torch.Tensor]] = []
    hvd.barrier()
    start = time.perf_counter()
    while len(kept) < steps // PERIOD:
        task.step(optimizer, share_of(hvd.rank()))
        if optimizer.rounds > len(kept):
            kept.append((time.perf_counter() - start, task.parameters()))
    optimizer.flush()
    return [(PERIOD * look, seconds, task.held_out_with(model)) for look, (seconds, model) in enumerate(kept, start=1)]


PAPER_BY_TIME = {PERIODIC: "best (D&M)", nodes.WP: "2nd", nodes.SIMUPARALLEL: "3rd", nodes.MINI_BATCH: "worst"}
PAPER_BY_ITERATION = {
    nodes.MINI_BATCH: "1st",
    PERIODIC: "2nd, close (D&M)",
    nodes.SIMUPARALLEL: "3rd",
    nodes.WP: "close to 3rd",
    nodes.SEQUENTIAL: "about as 3rd",
    nodes.DIRECT: "worst",
}
ORDER_BY_ITERATION = (
    (nodes.MINI_BATCH, PERIODIC),
    (PERIODIC, nodes.SIMUPARALLEL),
    (nodes.SIMUPARALLEL, nodes.WP),
    (nodes.WP, nodes.DIRECT),
)
CLOSE_BY_ITERATION = ((PERIODIC, nodes.MINI_BATCH), (nodes.WP, nodes.SIMUPARALLEL))
ORDER_BY_TIME = (
    (PERIODIC, nodes.WP),
    (nodes.WP, nodes.SEQUENTIAL),
    (nodes.WP, nodes.SIMUPARALLEL),
    (nodes.SIMUPARALLEL, nodes.DIRECT),
    (nodes.SIMUPARALLEL, nodes.MINI_BATCH),
    (nodes.WP, nodes.DIRECT),
)


def ranks(job: Job) -> Outcome:
    """The methods of figures 6 to 9, measured: losses after the same steps, and after the same time."""
    steps = job.choose(2_400, 240)
    curves = harness.launch(
        race, ranks=job.choose(RANKS, 2), transport=job.transport, asleep=True, steps=steps, seeds=job.choose(5, 1)
    )
    few = steps / SLOWER
    end = min(curve[-1][1] for curve in curves.values())  # beyond it a method would stand still
    rows, last = [], {}
    for what, at, column, paper in (
        (f"after {few:,.0f} steps of the fastest rank", few, 0, PAPER_BY_ITERATION),
        (f"after {end:.1f} s", end, 1, PAPER_BY_TIME),
    ):
        losses = {
            method: float(np.interp(at, [look[column] for look in curve], [look[2] for look in curve]))
            for method, curve in curves.items()
        }
        last[column] = losses
        for method, loss in sorted(losses.items(), key=lambda pair: pair[1]):
            rows.append(Row(f"hinge loss {what}: {method}", paper.get(method, ""), loss, "measured"))
    series = {method: ([look[1] for look in curve], [look[2] for look in curve]) for method, curve in curves.items()}
    by_iteration = nodes.verdict(last[0], ORDER_BY_ITERATION, CLOSE_BY_ITERATION)
    return Outcome(
        rows,
        Plot("seconds", "hinge loss", series, log_y=True),
        f"By iteration: {by_iteration} By time: {nodes.verdict(last[1], ORDER_BY_TIME)}",
        {"steps, seconds and loss": curves},
    )


# --- The last average ------------------------------------------------------------------------------------------------

SHARES = (1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25)  # of the full speed
TASKS: dict[str, type[Task]] = {"digits": Digits, "svm": Svm}
ANOTHER_SEED = 1_000


def last_averages(task: str, period: int, averages: int, contraction: float, seeds: int) -> list[list[float]]:
    """On every rank: by seed the losses of the weighted last average, of a plain one, and of the fastest rank's model.

    The last average comes when the fastest has taken four fifths of a period.
    """
    share = SHARES[hvd.rank() * len(SHARES) // hvd.size()]
    found = []
    for seed in range(seeds):
        harness.progress(f"{task}, {averages} averages before the last", seed, seeds)
        trained = TASKS[task](seed)
        policy = hvd.WeightedAverage(period, contraction)
        optimizer: Any = hvd.DistributedOptimizer(trained.optimizer, trained.model.named_parameters(), sync=policy)
        hvd.broadcast_parameters(trained.model.state_dict(), root_rank=0)
        while optimizer.rounds < averages:
            trained.step(optimizer, share)
        for _ in range(int(0.8 * period * share)):
            trained.step(optimizer, share)
        plain = hvd.allreduce(trained.parameters(), name="plain")
        losses = [trained.held_out_with(plain), hvd.broadcast_object(trained.held_out(), root_rank=0)]
        optimizer.flush()
        found.append([trained.held_out(), *losses])
    return found


def contraction_of_digits(steps: int) -> float:
    """Fitted to the losses of another seed, whose batches rank 0 draws."""
    task = Digits(ANOTHER_SEED)
    losses = []
    for _ in range(steps):
        task.optimizer.zero_grad()
        loss = task.loss()
        loss.backward()
        task.optimizer.step()
        losses.append(loss.item())
    return hvd.broadcast_object(estimate_contraction(losses), root_rank=0)


def flushes(seeds: int, scale: float) -> dict[str, Any]:
    """On every rank: all that `last_average` shows."""
    fitted = contraction_of_digits(480)
    figures: dict[str, Any] = {"fitted": fitted, "losses": {}}
    for name, task, period, averages, contraction in (
        ("digits, while the loss falls", "digits", 100, 3, fitted),
        ("digits, later", "digits", 100, 10, fitted),
        ("SVM", "svm", 300, 3, Svm.contraction),
    ):
        figures["losses"][name] = last_averages(task, int(scale * period), averages, contraction, seeds)
    return figures


def last_average(job: Job) -> Outcome:
    """`optimizer.flush()` under `hvd.WeightedAverage` against a plain mean of the same models."""
    seeds = job.choose(5, 1)
    measured = harness.launch(
        flushes,
        ranks=job.choose(RANKS, 2),
        transport=job.transport,
        asleep=True,
        seeds=seeds,
        scale=job.choose(1.0, 0.1),
    )
    rows = [Row("r of a step, digits, fitted to another seed", "", measured["fitted"], "measured")]
    rows.append(Row("r of a step, SVM, 1 - lambda * eta", "", Svm.contraction, "computed"))
    told, worse = [], []
    series: dict[str, tuple[list[float], list[float]]] = {}
    for name, losses in measured["losses"].items():
        better = sum(weighted < plain for weighted, plain, _ in losses)
        rows.append(Row(f"{name}: seeds of {seeds} in which the weighted average is better", "", better, "measured"))
        gains = [100 * (1 - weighted / plain) for weighted, plain, _ in losses]
        rows.append(Row(f"{name}: by how much its loss is smaller, %", "", statistics.fmean(gains), "measured"))
        over = statistics.fmean(100 * (1 - weighted / fastest) for weighted, _, fastest in losses)
        rows.append(Row(f"{name}: than that of the fastest rank's model, %", "", over, "measured"))
        told.append(f"{name}: {better} of {seeds}")
        if over < 0:
            worse.append(f"{name}: by {-over:.1f} %")
        series[name] = ([float(seed) for seed in range(seeds)], gains)
    return Outcome(
        rows,
        Plot("seed", "% by which the weighted average's loss is smaller", series, bars=True),
        f"Seeds in which the weighted last average has the smaller loss: {'; '.join(told)}. It is worse than the model of the "
        f"fastest rank alone, in the mean over the seeds: {'; '.join(worse) or 'nowhere'}.",
        measured,
    )
