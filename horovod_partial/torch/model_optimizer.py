"""The optimizer of the model policies: a local step, then an average of models.

WAGMA-SGD (IEEE TPDS 2021), P-Reduce (SIGMOD'21) and WP-SGD, as `hvd.GroupAverage`, `hvd.PartialReduce` and
`hvd.WeightedAverage`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from torch.nn.modules.module import register_module_forward_pre_hook

from horovod_partial import _core
from horovod_partial.bucket_config import FOR_EVER
from horovod_partial.contraction import average_converges, average_is_useful
from horovod_partial.policies import ModelPolicy, WeightedAverage
from horovod_partial.rounds import RoundInfo
from horovod_partial.torch.model_buckets import ModelBucket, averaged_tensors
from horovod_partial.torch.model_operations import average_async, average_over_all_, signal
from horovod_partial.torch.operations import PartialHandle, runtime
from horovod_partial.torch.wrapping import bucket_name, load_shared, unwrapped, wrapper


@dataclass(frozen=True)
class WeightedAverageInfo:
    """What an average by `hvd.WeightedAverage` was made of.

    Attributes:
        steps: by rank, taken since the average before.
        weights: by rank; the same bits on every rank.
        useful: the average has a better bound than the fastest rank's model alone (`hvd.average_is_useful`).
        converges: averages like this one, again and again, keep the bound (`hvd.average_converges`).
    """

    steps: tuple[int, ...]
    weights: tuple[float, ...]
    useful: bool
    converges: bool


def wrap(
    optimizer: torch.optim.Optimizer,
    *,
    names: dict[torch.nn.Parameter, str],
    named_buffers: Iterable[tuple[str, torch.Tensor]] | None,
    backward_passes_per_step: int,
    process_set: ProcessSet,
    policy: ModelPolicy,
    max_staleness: int | None,
    grace_ms: float | str | None,
) -> torch.optim.Optimizer:
    """An instance of a subclass of the optimizer's class that shares its state and parameter groups."""
    instance = wrapper(optimizer, _Methods)
    instance._start(
        names=names,
        named_buffers=named_buffers,
        backward_passes_per_step=backward_passes_per_step,
        process_set=process_set,
        policy=policy,
        max_staleness=max_staleness,
        grace_ms=grace_ms,
    )
    return instance


class _Methods(torch.optim.Optimizer):
    """Never made: becomes the body of a subclass of the wrapped optimizer's class, which is `_base`.

    Used by one thread at a time, as any optimizer.
    """

    is_horovod_partial = True
    _base: Any  # the wrapped optimizer's class

    def _start(
        self,
        *,
        names: dict[torch.nn.Parameter, str],
        named_buffers: Iterable[tuple[str, torch.Tensor]] | None,
        backward_passes_per_step: int,
        process_set: ProcessSet,
        policy: ModelPolicy,
        max_staleness: int | None,
        grace_ms: float | str | None,
    ) -> None:
        self.process_set = process_set
        self.backward_passes_per_step = backward_passes_per_step
        self._policy = policy
        self._max_staleness = max_staleness
        self._grace_ms = grace_ms
        self._named_buffers = list(named_buffers or ())
        averaged_tensors(
            self, policy.average, self._named_buffers
        )  # what does not fit fails here, not in the first step
        members = [names[p] for group in self.param_groups for p in group["params"]]
        self._name = f"{bucket_name(process_set, members)}.model"
        self._bucket: ModelBucket | None = None  # made in the first step: there is no state before
        self._in_flight: PartialHandle | None = None
        self._forward_hook: Any = None
        self._local_steps = 0
        self._generation = 0  # of Horovod; the next two begin again with it
        self._averages = 0
        self._steps_since_average = 0
        self.last_round: RoundInfo | None = None
        self.last_average: WeightedAverageInfo | None = None

    @property
    def _averages_models(self) -> bool:
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        return self.process_set.included() and (self.process_set.size() > 1 or elastic)

    # --- Step ----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step with this rank's own gradients, then the average that the policy asks for."""
        self.synchronize()
        loss = self._base.step(self, closure)
        self._local_steps += 1
        if not self._averages_models:
            return loss
        if self._generation != runtime.generation:
            self._generation = runtime.generation
            self._averages = self._steps_since_average = 0
        self._steps_since_average += 1
        if not isinstance(self._policy, WeightedAverage):
            self._start_average()
        elif self._is_period_over(self._policy):
            self._start_average()
            self._averages += 1
            self._steps_since_average = 0
        if not self._policy.overlap:
            self.synchronize()
        return loss

    def _start_average(self) -> None:
        flat = self._packed().flat
        self._in_flight = average_async(
            flat,
            flat,
            self._name,
            self._policy,
            self.process_set,
            self._steps_since_average,
            FOR_EVER if isinstance(self._policy, WeightedAverage) else self._max_staleness,
            self._grace_ms,
        )
        if self._policy.overlap:
            self._forward_hook = register_module_forward_pre_hook(lambda *_: self.synchronize())

    def synchronize(self) -> None:
        """Wait for an average that is under way, as `overlap` leaves it; gradients stay on their rank."""
        handle, bucket = self._in_flight, self._bucket
        self._forget_in_flight()
        if handle is None or bucket is None:
            return
        handle.synchronize()
        info = handle.info()
        self.last_round = info
        if not isinstance(self._policy, WeightedAverage):
            bucket.unpack()
        elif not info.late:  # else it is of others' models, made without this rank
            bucket.unpack()
            self.last_average = WeightedAverageInfo(
                steps=info.work,
                weights=tuple(_core.contraction_weights(list(info.work), self._policy.contraction)),
                useful=average_is_useful(info.work, self._policy.contraction),
                converges=average_converges(info.work, self._policy.contraction),
            )

    def _forget_in_flight(self) -> None:
        self._in_flight = None
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _packed(self) -> ModelBucket:
        tensors = averaged_tensors(self, self._policy.average, self._named_buffers)
        known = self._bucket.tensors if self._bucket is not None else []
        if len(known) != len(tensors) or any(a is not b for a, b in zip(known, tensors, strict=True)):
            self._bucket = ModelBucket(tensors)  # in the first step, or after loading
        assert self._bucket is not None
        self._bucket.pack()
        return self._bucket

    def _is_period_over(self, policy: WeightedAverage) -> bool:
        """Whether some rank has taken all the steps of this period.

        A round for each period tells: the first rank to come to its end closes it, and nobody waits. Round 0, in which
        all ranks take part, is before the first period.
        """
        process_set, name = self.process_set.process_set_id, f"{self._name}.period"
        if self._averages == 0 and self._steps_since_average == 1:
            signal(name, self.process_set)
        over = self._averages + 2
        while self._steps_since_average >= policy.period and runtime.completed(process_set, name) < over:
            # Once more if it only told of an earlier period, to which another rank came first.
            signal(name, self.process_set)
        return runtime.completed(process_set, name) >= over

    # --- As Horovod's --------------------------------------------------------------------------------------------

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """As Horovod's; it changes nothing under a model policy."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As Horovod's; gradients accumulate on their rank until `step` anyway."""
        self.backward_passes_per_step = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self._base.zero_grad(self, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after wrapping: the new parameters would not be averaged.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("add parameter groups before wrapping the optimizer: later ones would not be averaged")

    # --- Rounds --------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Averages that have been made: the clock that the ranks share, for schedules and for stopping."""
        if not self._averages_models:
            return self._local_steps  # alone, every step is a round
        return runtime.completed(self.process_set.process_set_id, self._name)

    def flush(self) -> None:
        """Average what the policy averages over all ranks, which all must flush: then the models are equal.

        Call it on every rank before an evaluation or a checkpoint, and at the end of training; ranks that have ended or
        joined need not come.
        """
        self.synchronize()
        if not self._averages_models:
            return
        process_set, name = self.process_set.process_set_id, f"{self._name}.flush"
        runtime.clear(process_set, name)  # averages that were made while this rank was out of training
        runtime.flush(process_set)
        bucket = self._packed()
        average_over_all_(bucket.flat, name, self.process_set)
        bucket.unpack()

    # --- State ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped optimizer's."""
        self.synchronize()
        return self._base.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's; what stands in for this rank in groups is forgotten."""
        if runtime.failed or not runtime.is_initialized():
            self._abandon()
        self.synchronize()
        runtime.clear(self.process_set.process_set_id, self._name)
        load_shared(self, self._base, state_dict)

    def _abandon(self) -> None:
        """Forget an average under way, whose Horovod is gone or about to go."""
        self._forget_in_flight()
        self._bucket = None  # Horovod may go on reading and writing the old one, which the handle keeps alive

    def __reduce__(self) -> tuple[Any, ...]:
        return unwrapped(self, self._base)


# PyTorch wraps the step of every class that has not this mark, and would run the step's hooks twice.
_Methods.step.hooked = True  # type: ignore[attr-defined]
