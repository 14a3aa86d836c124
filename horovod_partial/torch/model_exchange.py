"""Averages an optimizer's model over ranks after each rank's own step, in PyTorch.

The policies are `hvd.GroupAverage` (WAGMA-SGD, IEEE TPDS 2021), `hvd.PartialReduce` (P-Reduce, SIGMOD'21) and
`hvd.WeightedAverage` (WP-SGD).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from torch.nn.modules.module import register_module_forward_pre_hook

from horovod_partial import _core
from horovod_partial.checks import require
from horovod_partial.exchange import models
from horovod_partial.exchange.wp_sgd import average_converges, average_is_useful
from horovod_partial.policies import ModelPolicy, WeightedAverage
from horovod_partial.runtime import bucket_config
from horovod_partial.runtime.appliers import this_thread
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.torch.model_operations import ModelBucket, arrive, signal
from horovod_partial.torch.operations import PartialHandle, runtime
from horovod_partial.torch.round_steps import RoundSteps
from horovod_partial.torch.wrapping import Exchange, Name

# By the size of an element in bytes: the integer type as which a checksum reads the element, and the type of the sum.
# PyTorch adds integers of 32 bits in a tenth of the time if their sum has 32 bits instead of 64.
_INTEGERS = {
    1: (torch.int8, torch.int32),
    2: (torch.int16, torch.int32),
    4: (torch.int32, torch.int32),
    8: (torch.int64, torch.int64),
}


@dataclass(frozen=True)
class WeightedAverageInfo:
    """What went into an average by `hvd.WeightedAverage`.

    `steps` says by rank how many steps a rank took since the previous average, and `weights` how much its model counts.
    All ranks have the same numbers. `useful` is `wp_sgd.average_is_useful`: the average has a better error bound than
    the fastest rank's model. `converges` is `wp_sgd.average_converges`: repeated averages keep this bound.
    """

    steps: tuple[int, ...]
    weights: tuple[float, ...]
    useful: bool
    converges: bool


class ModelExchange(models.ModelExchange, Exchange):
    """Averages an optimizer's model under a policy of models: a local step, then an average.

    Only one thread may use this object at a time, same as any optimizer. An optimizer without trained parameters raises
    ValueError. Only policies with "buffers" in `average` use `named_buffers`.
    """

    runtime, signal = runtime, staticmethod(signal)

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        names: dict[torch.nn.Parameter, str],
        named_buffers: list[tuple[str, torch.Tensor]],
        process_set: ProcessSet,
        policy: ModelPolicy,
        round_steps: RoundSteps,
    ) -> None:
        super().__init__(policy, process_set)
        self.round_steps = round_steps
        fits = all(isinstance(pair, tuple) for pair in named_buffers)
        require(fits, "named_buffers", "model.named_buffers()", named_buffers)
        self._named_buffers = named_buffers
        self._names = names
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._trained = [p for p in parameters if p.requires_grad]
        self._frozen = [p for p in parameters if not p.requires_grad]
        if not self._trained:
            raise ValueError("there is nothing to average: no parameter of the optimizer requires a gradient")
        self._name = Name(process_set, [names[p] for p in parameters])
        self._members = tuple(bucket_config.member(names[p], p.shape) for p in self._trained)
        self._tenure = Tenure(runtime)  # tells whether the bucket was declared since the last `hvd.init()`
        # The model, packed into one tensor. None before the first step, because until then the optimizer has no state.
        self._bucket: ModelBucket | None = None
        self._in_flight: PartialHandle | None = None
        # Checksums of the parameters, while an average runs beside the program's work; else None.
        self._checksums: torch.Tensor | None = None
        self._forward_hook: Any = None

    def _enter(self) -> None:
        if self._tenure.enter():
            self.use_name(self._name.current())
            runtime.settle_in_flushes(self)

    def _tensors(self, optimizer: torch.optim.Optimizer, *, with_state: bool = True) -> list[torch.Tensor]:
        average = self.policy.average if with_state else tuple(set(self.policy.average) - {"state"})
        return averaged_tensors(self._trained, optimizer.state, average, self._named_buffers)

    def _refuse_other_layers(self) -> None:
        changed = [p for p in self._trained if not p.requires_grad] + [p for p in self._frozen if p.requires_grad]
        if changed:
            raise RuntimeError(
                f"{self._names[changed[0]]} was frozen or unfrozen after the optimizer was wrapped, and {self.policy!r} averages "
                "what was trained then: call optimizer.flush(), then wrap an optimizer of what is trained from now on"
            )

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        self._refuse_other_layers()
        self.synchronize()

        def evaluated() -> Any:
            loss = None if closure is None else closure()
            self.round_steps.before(optimizer)
            return loss

        if closure is None:
            evaluated()
        loss = optimizer._base.step(optimizer, None if closure is None else evaluated)
        self.round_steps.after(optimizer)
        self._local_steps += 1
        if not self.is_needed:
            return loss
        self._enter()
        steps = self.steps_to_average()
        if steps is not None:
            flat = self._pack(self._tensors(optimizer)).flat
            self._in_flight = arrive(flat, flat, self.name, self.policy, self.process_set, steps, members=self._members)
            if not self.policy.overlap:
                self.synchronize()
                return loss
            self._checksums = self._present_checksums()
            self.thread = this_thread()
            if self.policy.overlap != "gradient":
                self._forward_hook = register_module_forward_pre_hook(lambda *_: self.synchronize())
        return loss

    def _present_checksums(self) -> torch.Tensor:
        """Return for each parameter the sum of its elements, read as integers: their order does not change the sum."""
        sums = []
        for parameter in self._trained:
            integer, total = _INTEGERS[parameter.element_size()]
            sums.append(parameter.detach().view(integer).sum(dtype=total).long())
        return torch.stack(sums)

    def _changed(self) -> str:
        """Return the name of a parameter that has changed since the average under way began; empty if there is none.

        Checksums find almost every change, also by Horovod or through `parameter.data`, but only of parameters.
        """
        if self._checksums is None:
            return ""
        differ = (self._checksums != self._present_checksums()).nonzero()
        return self._names[self._trained[int(differ[0])]] if len(differ) else ""

    def synchronize(self) -> None:
        """Wait for the average under way, if any. Raises RuntimeError if a parameter was changed meanwhile."""
        if changed := self._end_average():
            raise RuntimeError(
                f"{changed} was changed between a step and the end of its average, under {self.policy!r}: call "
                "optimizer.synchronize() before you change the model"
            )

    def settle(self) -> None:
        self._end_average()  # this drops the average if the program has loaded or broadcast other parameters

    def _end_average(self) -> str:
        """Wait for the average under way, and write it. If a parameter was changed, return its name instead."""
        handle, bucket, changed = self._in_flight, self._bucket, self._changed()
        self._forget_in_flight()
        if handle is None or bucket is None or not self._tenure.is_current:
            return ""
        handle.synchronize()
        info = handle.info()
        self.last_round = info
        if changed or (info.late and not models.takes_late(self.policy)):
            return changed
        bucket.unpack()
        if isinstance(self.policy, WeightedAverage):
            self.last_average = WeightedAverageInfo(
                steps=info.work,
                weights=tuple(_core.contraction_weights(list(info.work), self.policy.contraction)),
                useful=average_is_useful(info.work, self.policy.contraction),
                converges=average_converges(info.work, self.policy.contraction),
            )
        return ""

    def _pack(self, tensors: Sequence[torch.Tensor]) -> ModelBucket:
        if self._bucket is None or list(map(id, self._bucket.tensors)) != list(map(id, tensors)):
            self._bucket = ModelBucket(tensors)  # the first step and `load_state_dict` make new state tensors
        self._bucket.pack()
        return self._bucket

    def _forget_in_flight(self) -> None:
        self._in_flight = self._checksums = None
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _average_over_all(
        self, model: Sequence[torch.Tensor], name: str, policy: WeightedAverage, work: int
    ) -> Sequence[int]:
        bucket = self._pack(model)
        handle = arrive(bucket.flat, bucket.flat, name, policy, self.process_set, work)
        handle.synchronize()
        bucket.unpack()
        return handle.info().work

    @property
    def rounds(self) -> int:
        if not self.is_needed:
            return self._local_steps  # without other ranks every step counts as a round
        return super().rounds if self._tenure.is_current else 0

    def flush_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.synchronize()
        if self.is_needed:
            self._enter()
            # Before the first round a rank may have taken no step, so its optimizer may have no state yet.
            self.flush(self._tensors(optimizer, with_state=self.rounds > 0))
        self._flushed_at = self._local_steps

    @property
    def is_flushed(self) -> bool:
        return not self.is_needed or self._flushed_at == self._local_steps

    stop_reducing = settle
    before_state_dict = synchronize

    def forget(self) -> None:
        if runtime.failed or not runtime.is_initialized():
            self._forget_in_flight()
            self._bucket = None  # Horovod may still write to the old bucket; its handle keeps the memory alive
        self.settle()
        if self._tenure.is_current:
            self._named(self.name).clear()


def averaged_tensors(
    parameters: Sequence[torch.nn.Parameter],
    state: Mapping[Any, dict[str, Any]],
    average: tuple[str, ...],
    named_buffers: Iterable[tuple[str, torch.Tensor]],
) -> list[torch.Tensor]:
    """Return the tensors that a policy of models averages, in the same order on every rank.

    State means tensors that the optimizer keeps in the shape of a parameter, such as momentum. Counters of steps are
    not averaged. If a parameter has had no gradient on this rank, it has no state here. Its state counts as zeros then,
    because state begins with zeros. `average` has some of `"parameters"`, `"buffers"` and `"state"`.
    """
    tensors: list[torch.Tensor] = list(parameters)
    if "buffers" in average:
        tensors += [buffer for _, buffer in named_buffers if buffer.dtype.is_floating_point]
    if "state" in average:
        states: list[dict[str, Any]] = [
            {
                key: value
                for key, value in state.get(parameter, {}).items()
                if key != "step"
                and isinstance(value, torch.Tensor)
                and value.dtype.is_floating_point
                and value.shape == parameter.shape
            }
            for parameter in parameters
        ]
        for key in sorted({key for own in states for key in own}):
            for parameter, own in zip(parameters, states, strict=True):
                tensors.append(own[key] if key in own else torch.zeros_like(parameter))
    return tensors
