"""What the programs of this folder share: their options, their clock, and the line of JSON that they end with."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import horovod_partial.torch as hvd

Batch = TypeVar("Batch")

POINTS = 8  # of the curve, beside the last
TURNS = (0.25, 0.5, 1.0, 2.25)  # times the mean delay
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the time that a step computes
CAN_BE_LATE = ("solo", "majority", "quorum", "group_average")  # elsewhere ranks wait, if for few others


def options(
    description: str | None,
    *,
    rate: float,
    steps: int,
    momentum: float | None = None,
    batch: int | None = None,
    balances: bool = False,
    optimizers: Sequence[str] = (),
    what: str = "of each rank",
) -> argparse.Namespace:
    """The command line, with these defaults.

    A momentum, accumulation and a choice of optimizers are there if they are given, balanced batches if the program has them.
    """
    parser = argparse.ArgumentParser(
        description=(description or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--policy", default="full", help="as text; see docs/api.md")
    parser.add_argument("--rate", type=float, default=rate, help="learning rate")
    if batch is not None:
        parser.add_argument("--batch", type=int, default=batch, help="samples of a backward pass")
        parser.add_argument(
            "--passes", type=int, default=1, help="backward passes of a step, on each rank or on average"
        )
        parser.add_argument("--delay-ms", type=float, default=0.0, help="mean sleep in each pass; ranks take turns")
    if balances:
        parser.add_argument(
            "--balanced", action="store_true", help="in each step all ranks have samples of like length"
        )
    if optimizers:
        parser.add_argument("--optimizer", choices=optimizers, default=optimizers[0], help="what takes the steps")
    if momentum is not None:
        parser.add_argument("--momentum", type=float, default=momentum, help="of SGD; Adam's first beta")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the batches and the first model")
    parser.add_argument("--steps", type=int, default=steps, help=what)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, for a shorter training")
    found = parser.parse_args()
    if balances and found.balanced and found.policy == "work_sharing":
        parser.error("--balanced is for steps that each rank takes itself")
    found.steps = round(found.steps * found.share)
    return found


class Kinds(torch.optim.Optimizer):
    """Groups of parameters, each with the optimizer of PyTorch whose name is its `kind`; for a training without checkpoints."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self._parts = [getattr(torch.optim, group["kind"])([group]) for group in self.param_groups]
        for part in self._parts:
            part.state = self.state  # where a flush compares it

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def cosine(steps: int, warm_up: int = 0) -> Callable[[int], float]:
    """A schedule of so many steps, which rises to 1 in the first ones and then falls."""

    def factor(step: int) -> float:
        decay = max(0.05, (1 + math.cos(math.pi * step / steps)) / 2)
        return min(1.0, (step + 1) / (warm_up + 1)) * decay

    return factor


def draw(epoch: Callable[[], Sequence[Batch]], steps: int, generator: torch.Generator) -> Iterator[Batch]:
    """So many batches: those that `epoch` makes, shuffled, then those that it makes next."""
    while True:
        batches = epoch()
        for number in torch.randperm(len(batches), generator=generator):
            if steps == 0:
                return
            steps -= 1
            yield batches[number]


def balanced(lengths: Sequence[int], batch: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Numbers of samples: so many batches of this rank, as long as those of the other ranks in the same step."""
    sampler = hvd.BalancedBatchSampler(lengths, batch, seed=seed)
    epochs = itertools.count()
    while steps > 0:
        sampler.set_epoch(next(epochs))
        yield from itertools.islice(sampler, steps)
        steps -= len(sampler)


def micro_batches(
    optimizer: torch.optim.Optimizer, options: argparse.Namespace, draw: Callable[[int], Iterator[Batch]], clock: Clock
) -> Iterator[tuple[Batch, bool]]:
    """The batches that this rank computes, each after its delay, and with whether a step follows it.

    Args:
        optimizer: that takes the steps, `options.passes` backward passes in each.
        options: of the command line.
        draw: makes the batches of a rank. Under `work_sharing` any rank may compute them.
        clock: is told of each.
    """
    if options.policy != "work_sharing":
        for number, batch in enumerate(draw(hvd.rank())):
            clock.batch(delay(options.delay_ms, number // options.passes))
            yield batch, (number + 1) % options.passes == 0
        return
    drawn = [list(draw(home)) for home in range(hvd.size())]
    steps = len(drawn[0]) // options.passes
    while optimizer.rounds < steps:
        step, number = optimizer.begin_micro_batch()
        clock.batch(delay(options.delay_ms, step))
        home, index = divmod(number, options.passes)
        yield drawn[home][step * options.passes + index], True


class ModelSync:
    """Averages the models of all ranks after the first step, and each time so many rounds more have passed.

    eager-SGD as it was published does so. Ranks that have flushed are not waited for, and do not count. All ranks make
    theirs in the same order.

    Args:
        optimizer: a `hvd.DistributedOptimizer` under a policy of gradients.
        every: rounds from one average to the next.
    """

    _numbers = itertools.count()

    def __init__(self, optimizer: torch.optim.Optimizer, every: int) -> None:
        self._optimizer, self._every, self._last = optimizer, every, -1
        self._name = f"model sync {next(self._numbers)}"
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def after_step(self) -> None:
        """Average the models if that is due."""
        due = self._optimizer.rounds // self._every
        if due <= self._last:
            return
        self._last = due
        model = parameters_to_vector(self._parameters).detach()
        handle = hvd.average_async(model, hvd.WeightedAverage(1, 1.0), name=self._name, steps=0)  # all weigh alike
        average = hvd.synchronize(handle)
        # A late average is of older models, and was made while this rank was out of training.
        if not hvd.round_info(handle).late:
            parts = average.split([parameter.numel() for parameter in self._parameters])
            with torch.no_grad():
                for parameter, part in zip(self._parameters, parts, strict=True):
                    parameter.copy_(part.view_as(parameter))


def delay(mean_ms: float, step: int) -> float:
    """Seconds, as if something else ran on this machine: ranks take turns at being slow, and do so equally often."""
    return 1e-3 * mean_ms * TURNS[(hvd.rank() + step) % len(TURNS)]


class Clock:
    """Times a training, which begins on all ranks when this is made, and keeps rank 0's model now and then.

    Args:
        model: that is trained.
        steps: of rank 0, about.
        passes: batches of a step.
    """

    def __init__(self, model: nn.Module, steps: int, passes: int = 1) -> None:
        self._model = model
        self._every = max(1, steps // POINTS)
        self._passes, self._batches = passes, 0
        self._worked: list[float] = []  # seconds of computing by this thread, at the start of each step
        self._began = 0.0, 0.0  # the newest batch, and its work
        self._of_passes: list[tuple[float, float]] = []  # seconds of delay and of work
        self._kept: list[tuple[float, torch.Tensor]] = []
        self._other_buckets = set(hvd.partial_stats())
        hvd.barrier()
        self._start = time.perf_counter()

    def batch(self, delay: float = 0.0) -> None:
        """A batch begins, and perhaps a step; then this sleeps for the seconds of the delay."""
        if self._batches % self._passes == 0:
            if hvd.rank() == 0 and len(self._worked) % self._every == 0:
                parameters = parameters_to_vector(self._model.parameters()).detach()
                self._kept.append((time.perf_counter() - self._start, parameters))
            self._worked.append(time.thread_time())
        self._batches += 1
        begin = time.perf_counter()
        if delay:
            time.sleep(delay)
        self._began = begin, time.perf_counter()

    def passed(self) -> None:
        """The backward pass of the newest batch has ended. It need not be told of where a step has one pass."""
        begin, work = self._began
        self._of_passes.append((work - begin, time.perf_counter() - work))

    def report(
        self,
        test: Callable[[], tuple[float, int]],
        *,
        policy: str,
        name: str,
        better: Literal["higher", "lower"],
        of_mean: Callable[[float], float] = float,
    ) -> None:
        """The training has ended, with a flush: test the model, and print on rank 0 what came out.

        Args:
            test: tests this rank's model on its share of what is held out; gives a sum, and what to divide it by.
            policy: of the training.
            name: of the quality.
            better: which of two qualities is the better one.
            of_mean: makes the quality of the quotient.
        """
        self._worked.append(time.thread_time())
        seconds = max(hvd.allgather_object(time.perf_counter() - self._start))
        work = hvd.allgather_object(np.diff(self._worked))
        passes = hvd.allgather_object(self._of_passes)
        late = self._late_share(sum(map(len, work))) if policy.startswith(CAN_BE_LATE) else None
        # eager-SGD as published ends with an average of the models; elsewhere they are equal by now.
        mine = parameters_to_vector(self._model.parameters()).detach()
        vector_to_parameters(hvd.allreduce(mine, name="last"), self._model.parameters())
        tests = [test()]
        kept = hvd.broadcast_object(self._kept, root_rank=0, name="kept")
        for _, parameters in kept:
            vector_to_parameters(parameters, self._model.parameters())
            tests.append(test())
        sums = hvd.allreduce(torch.tensor(tests, dtype=torch.float64), name="tests").tolist()
        quality, *earlier = (of_mean(total / count) for total, count in sums)
        curve = [(when, value) for (when, _), value in zip(kept, earlier, strict=True)]
        if hvd.rank() == 0:
            figures = {
                "seconds": seconds,
                "quality": quality,
                "quality_name": name,
                "better": better,
                "late": late,
                "curve": [*curve, (seconds, quality)],
                "work_ms": (1e3 * np.quantile(np.concatenate(work), QUANTILES)).tolist(),
                "limit": self._limit(policy, seconds, work, passes),
            }
            print(json.dumps(figures), flush=True)

    def _late_share(self, arrivals: int) -> float:
        """The share of all ranks' steps that were too late for their round."""
        # Gradients' buckets have their rounds together; those of flushes and of averages of models have fewer.
        on_time = [
            sum(bucket["on_time"]) for name, bucket in hvd.partial_stats().items() if name not in self._other_buckets
        ]
        return 1 - max(on_time) / arrivals

    def _limit(self, policy: str, seconds: float, work: list[np.ndarray], passes: list[Any]) -> float | None:
        if self._passes == 1:
            return limit_of_computing(work)
        if policy != "full":  # whose ranks take equally many passes
            return None
        return limit_of_sharing(np.reshape(passes, (len(passes), -1, self._passes, 2)), seconds)


def perplexity(mean_loss: float) -> float:
    return math.exp(min(mean_loss, 100.0))  # a diverged model's would be no number


def limit_of_computing(work: list[np.ndarray]) -> float | None:
    """How much faster any policy can be than waiting for all in each step; None where ranks take unequally many."""
    if len(set(map(len, work))) > 1:
        return None
    by_step = np.array(work)
    return float(by_step.max(axis=0).sum() / by_step.sum(axis=1).max())


def limit_of_sharing(passes: np.ndarray, seconds: float) -> float:
    """How much faster a training under `full` would be if the best schedule of whole micro-batches shared those of each update.

    That schedule knows all times beforehand: the longest micro-batch comes next, on the rank that ends it first. (It is the best
    one where micro-batches are alike, and close to it elsewhere.) On any rank a micro-batch takes the seconds of work that were
    measured for it, and the mean delay that this rank had in this update. All else is as it was measured: the reduction after
    the last micro-batch, the optimizer's step, the choice of the data. What sharing itself costs is not in it.

    Args:
        passes: seconds of each, by rank, update, number in the update, and delay or work.
        seconds: of the training.
    """
    saved = 0.0
    for update in passes.swapaxes(0, 1):
        delays = update[:, :, 0].mean(axis=1)
        ends = np.zeros(len(delays))
        for work in sorted(update[:, :, 1].flat, reverse=True):
            first = np.argmin(ends + delays)
            ends[first] += delays[first] + work
        saved += max(0.0, update.sum(axis=(1, 2)).max() - ends.max())
    return float(seconds / (seconds - saved))
