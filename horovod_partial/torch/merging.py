"""Measures a training, and plans which gradients travel together: `fusion=hvd.MergedGradients`."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allgather

from horovod_partial import fusion
from horovod_partial.fusion import FusionPlan, MergedGradients, MessageCost
from horovod_partial.policies import Quorum
from horovod_partial.torch.buckets import kind
from horovod_partial.torch.operations import make_config, submit

# The range of the paper's profiler, 32 KiB to 2 MiB (section 5; the released code).
_PROBE_BYTES = tuple(2**n for n in range(15, 22))
_PROBES = 20  # of each size
_ATTEMPTS = 3  # a machine may be busy for a moment
_WORTH_IT = 0.95  # of the old plan's time: buckets that are replaced cost a round of all ranks


class Clock:
    """Times of the gradients of some steps, on one rank.

    Hooks call `gradient` in autograd's threads, the application's thread all else; never at the same time.
    """

    def __init__(self) -> None:
        self.measuring = False
        self.forget()

    def forget(self) -> None:
        """Begin anew with the next step."""
        self._times: list[dict[torch.nn.Parameter, float]] = []
        self._current: dict[torch.nn.Parameter, float] = {}
        self._around: list[float] = []
        self._steps: list[float] = []
        self._last_end: float | None = None
        self._synchronized = 0.0

    def gradient(self, parameter: torch.nn.Parameter) -> None:
        """A gradient is there, once its device is through with it."""
        if parameter.is_cuda:
            torch.cuda.synchronize(parameter.device)
        self._current[parameter] = time.perf_counter()

    def synchronized(self) -> None:
        """All results are there."""
        self._synchronized = time.perf_counter()

    def step_ended(self) -> None:
        """A step is over."""
        now = time.perf_counter()
        if self._last_end is not None and self._current:
            self._times.append(self._current)
            self._steps.append(now - self._last_end)
            first = min(self._current.values())
            self._around.append(first - self._last_end + now - self._synchronized)
        self._last_end = now
        self._current = {}

    @property
    def steps(self) -> int:
        """Steps that have been measured."""
        return len(self._steps)

    def step_seconds(self) -> float:
        """Median of the measured steps."""
        return statistics.median(self._steps)

    def around_seconds(self) -> float:
        """Median of what of a step is before the first gradient and after the last result."""
        return statistics.median(self._around)

    def ready(self, parameters: Sequence[torch.nn.Parameter]) -> dict[torch.nn.Parameter, float]:
        """When each gradient is there, in seconds after the first, earliest first; the last moment if it never was."""
        seconds: dict[torch.nn.Parameter, list[float]] = {}
        for times in self._times:
            first = min(times.values())
            for parameter, moment in times.items():
                seconds.setdefault(parameter, []).append(moment - first)
        medians = {parameter: statistics.median(values) for parameter, values in seconds.items()}
        latest = max(medians.values(), default=0.0)
        ready = {parameter: medians.get(parameter, latest) for parameter in parameters}
        return dict(sorted(ready.items(), key=lambda item: item[1]))


class Merging:
    """When to measure, and what to do then; for one optimizer.

    Args:
        name: of the optimizer's buckets.
        reduce: sums a tensor over the ranks in the way that the training takes, under a name, and waits; False if what
            came back was not made with this rank's contribution, so that its time tells nothing.
        wire_bytes: of a parameter's gradient.
    """

    def __init__(
        self,
        options: MergedGradients,
        names: dict[torch.nn.Parameter, str],
        parameters: Sequence[torch.nn.Parameter],
        process_set: ProcessSet,
        name: str,
        reduce: Callable[[str, torch.Tensor], bool],
        wire_bytes: Callable[[torch.nn.Parameter], int],
    ) -> None:
        self.clock = Clock()
        self.plan: FusionPlan | None = None
        self._options = options
        self._names = {parameter: names[parameter] for parameter in parameters}
        self._process_set = process_set
        self._name = name
        self._reduce = reduce
        self._wire_bytes = wire_bytes
        self._steps = 0
        self._next = 1 if options.plan is not None else options.warmup_steps + 1
        self._watched = 0  # steps under a new plan until it has been measured
        self.clock.measuring = options.plan is None

    def restart(self) -> None:
        """Horovod has been initialised anew, perhaps with other ranks: measure again."""
        self.plan = None
        self._steps = 0
        self._next = self._options.warmup_steps + 1
        self.clock.forget()
        self.clock.measuring = True

    def step_ended(self) -> bool:
        """A step is over; True if it is time to plan, on this rank and on all others."""
        self._steps += 1
        if self.clock.measuring:
            self.clock.step_ended()
        if self._watched > 0 and self.clock.steps >= self._watched and self.plan is not None:
            self.plan = replace(self.plan, measured=self.clock.step_seconds())
            self._watched = 0
            self.clock.measuring = False
        if self._steps == self._next:
            return True
        if self._steps == self._next - self._options.warmup_steps - 1 and self._options.replan_every is not None:
            self.clock.forget()
            self.clock.measuring = True
        return False

    def everybody_is_here(self) -> bool:
        """Wait for all ranks; False if one has left: it cannot agree to a plan, so this one stays for good.

        Before the ranks flush: those that train no more may be flushing for another reason.

        Raises:
            HorovodInternalError: a rank has left before it ever came here.
        """
        size = self._process_set.size()
        config = make_config(
            dtype=torch.float32, shape=(1,), sync=Quorum(1.0), size=size, missed="latest", late="discard"
        )
        handle = submit(torch.zeros(1), torch.zeros(1), f"{self._name}.everybody", self._process_set, config)
        handle.synchronize()
        info = handle.info()
        here = not info.late and info.fresh == size
        if not here:
            self._next = -1
        return here

    def make_plan(self, current: Sequence[Sequence[torch.nn.Parameter]]) -> list[list[torch.nn.Parameter]] | None:
        """Rank 0 plans, and all ranks get the plan: which parameters' gradients travel together.

        Returns:
            None if what is in use, `current`, stays.

        Raises:
            ValueError: the plan does not fit the parameters of some rank; on every rank.
        """
        planned = self._options.plan if self._steps == 1 and isinstance(self._options.plan, FusionPlan) else None
        if planned is None:
            for _ in range(_ATTEMPTS):
                cost = self._from_rank_0(self._measure_cost(), "cost")
                if isinstance(cost, MessageCost):
                    break
            planned = self._from_rank_0(self._plan(current, cost), "plan")
        members = self._check(planned)
        changed = not planned.reason and members != [list(bucket) for bucket in current]
        self.plan = planned
        self._next = self._steps + self._options.replan_every if self._options.replan_every is not None else -1
        self.clock.forget()
        self.clock.measuring = True
        self._watched = self._options.warmup_steps
        return members if changed else None

    def _from_rank_0(self, value: Any, what: str) -> Any:
        root = self._process_set.ranks[0] if self._process_set.ranks else 0
        return broadcast_object(value, root, f"{self._name}.{what}", process_set=self._process_set)

    def _measure_cost(self) -> MessageCost | str:
        """The cost of a message, or why it could not be measured. Every rank takes part."""
        seconds: dict[int, list[float]] = {nbytes: [] for nbytes in _PROBE_BYTES}
        device = next(iter(self._names)).device
        probes = {nbytes: torch.zeros(nbytes // 4, device=device) for nbytes in _PROBE_BYTES}
        # A message waits for Horovod's next cycle. Probes that began just after the one before had ended would all wait
        # for a whole one, and most sizes would take the same time; these begin anywhere in it, evenly.
        cycle = float(os.environ.get("HOROVOD_CYCLE_TIME") or 1.0) / 1e3
        for probe in range(_PROBES + 1):
            for nbytes, tensor in probes.items():
                time.sleep(cycle * (probe + 0.5) / (_PROBES + 1))
                start = time.perf_counter()
                in_time = self._reduce(f"{self._name}.probe.{nbytes}", tensor)
                if in_time and probe > 0:  # the first of a name is a round of all ranks
                    seconds[nbytes].append(time.perf_counter() - start)
        medians = {nbytes: statistics.median(times) for nbytes, times in seconds.items() if times}
        try:
            return MessageCost.fit(list(medians), list(medians.values()))
        except ValueError as error:
            return str(error)

    def _plan(self, current: Sequence[Sequence[torch.nn.Parameter]], cost: MessageCost | str) -> FusionPlan:
        ready = self.clock.ready(list(self._names))
        if isinstance(cost, str):
            parameters = [parameter for bucket in current for parameter in bucket]
            return FusionPlan(
                rule=self._options.rule,
                gradients=tuple(self._names[p] for p in parameters),
                nbytes=tuple(map(self._wire_bytes, parameters)),
                ready=tuple(ready[p] for p in parameters),
                messages=tuple(map(len, current)),
                around=self.clock.around_seconds(),
                reason=cost,
            )
        # One dtype and device after the other: what is in one message has one.
        kinds = {k: [p for p in ready if kind(p) == k] for k in dict.fromkeys(map(kind, ready))}
        parameters = [parameter for members in kinds.values() for parameter in members]
        breaks, at = [], 0
        for members in list(kinds.values())[:-1]:
            at += len(members)
            breaks.append(at)
        made = fusion.plan(
            self._options.rule,
            [self._names[p] for p in parameters],
            list(map(self._wire_bytes, parameters)),
            [ready[p] for p in parameters],
            cost,
            breaks=breaks,
            around=self.clock.around_seconds(),
        )
        if self.plan is None or self.plan.reason or sorted(self.plan.gradients) != sorted(made.gradients):
            return made
        by_name = dict(zip(made.gradients, zip(made.nbytes, made.ready, strict=True), strict=True))
        now = [by_name[name] for name in self.plan.gradients]
        old = replace(
            self.plan,
            nbytes=tuple(nbytes for nbytes, _ in now),
            ready=tuple(moment for _, moment in now),
            cost=cost,
            around=made.around,
            measured=None,
        )
        return made if made.duration(cost) < _WORTH_IT * old.duration(cost) else old

    def _check(self, planned: FusionPlan) -> list[list[torch.nn.Parameter]]:
        """The plan's messages as parameters, if every rank can follow it, and all have the same."""
        parameters = {name: parameter for parameter, name in self._names.items()}
        members: list[list[torch.nn.Parameter]] = []
        problem = ""
        if sorted(planned.gradients) != sorted(parameters):
            missing = sorted(set(parameters).symmetric_difference(planned.gradients))
            problem = f"the fusion plan is for other parameters: {', '.join(missing[:3])} and so on"
        else:
            members = [[parameters[name] for name in names] for names in planned.names()]
            if any(len({kind(p) for p in message}) > 1 for message in members):
                problem = "the fusion plan mixes dtypes or devices in a message"
        shapes = [[(self._names[p], tuple(p.shape), str(p.dtype)) for p in message] for message in members]
        digest = int.from_bytes(hashlib.sha256(repr(shapes).encode()).digest()[:7], "big")
        everybody = allgather(
            torch.tensor([[bool(problem), digest]]), name=f"{self._name}.check", process_set=self._process_set
        ).tolist()
        if problem:
            raise ValueError(f"{problem}; measure a new one")
        unfit = [rank for rank, (failed, _) in enumerate(everybody) if failed]
        if unfit:
            raise ValueError(f"the fusion plan does not fit the model of ranks {', '.join(map(str, unfit))}")
        different = [rank for rank, (_, theirs) in enumerate(everybody) if theirs != everybody[0][1]]
        if different:
            raise ValueError(
                f"ranks {', '.join(map(str, different))} have another model or another plan than rank 0; build the same "
                "model, with the same fusion, on every rank"
            )
        return members
