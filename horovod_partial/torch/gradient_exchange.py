"""Gradients that are packed into buckets and reduced over ranks before an optimizer's step.

For the partial policies (eager-SGD, PPoPP'20, section 3), and for merged gradients under every policy (MG-WFBP).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from horovod.common.util import split_list
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average

from horovod_partial import _attach
from horovod_partial.fusion import FusionPlan, MergedGradients
from horovod_partial.policies import Full
from horovod_partial.runtime import Tenure, is_alone
from horovod_partial.settings import settings
from horovod_partial.torch import buckets
from horovod_partial.torch.buckets import GradientBucket
from horovod_partial.torch.fusion import Collectives, Fusion
from horovod_partial.torch.model_buckets import ModelBucket
from horovod_partial.torch.model_operations import average_over_all_
from horovod_partial.torch.operations import (
    PartialHandle,
    device_number,
    make_config,
    runtime,
    submit,
    synchronize,
)
from horovod_partial.torch.wrapping import Exchange, Name


class GradientExchange(Exchange):
    """The exchange of an optimizer under a policy of gradients, and of merged gradients under every policy.

    Hooks run in the threads of autograd, everything else in the application's; backward has ended before the
    application goes on, so they never run at the same time, and nothing here needs a lock.

    Args:
        optimizer: whose gradients are reduced.
        names: of its parameters.
        compression: as in `hvd.DistributedOptimizer`, as the others but for the last one.
        bucket_options: arguments of `make_config`, and `gradient_predivide_factor`.

    Raises:
        ValueError: an argument does not fit.
    """

    exchanged = "reduced"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        names: dict[torch.nn.Parameter, str],
        compression: Any,
        backward_passes_per_step: int,
        groups: int | Sequence[Sequence[torch.nn.Parameter]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        model_sync_every: int | None,
        grad_scaler: torch.amp.GradScaler | None,
        fusion: MergedGradients | None,
        bucket_options: dict[str, Any],
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(  # noqa: TRY004 (it is the policy that does not fit)
                "LBFGS evaluates its closure several times a step, which buckets cannot follow; use Full() without fusion"
            )
        self.process_set = process_set
        self.synchronized = False
        self._passes = backward_passes_per_step
        self._sparse_as_dense = sparse_as_dense
        self._model_sync_every = model_sync_every
        self._tenure = Tenure(runtime)  # of the buckets
        self._model_syncs = -1
        self._grad_scaler = grad_scaler
        self._scale = 1.0
        self._local_steps = 0
        self._flushed_at = 0  # of these steps
        self._has_warned = False
        self._earlier: list[list[torch.Tensor]] = []
        self._hooks: list[Any] = []

        self._compression = compression
        self._bucket_options = dict(bucket_options)
        self._full = isinstance(self._bucket_options["sync"], Full)
        self._predivide = self._bucket_options.pop("gradient_predivide_factor")
        if self._predivide != 1.0 and self._bucket_options["op"] != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        planned = buckets.plan(parameters, _check_groups(groups, parameters), settings().bucket_mb * 1e6)
        self._planned = planned
        self._names = {parameter: names[parameter] for parameter in parameters}
        self._use_buckets({str(index): members for index, members in enumerate(planned)})
        self._fusion_options = fusion
        self._fusion: Fusion | None = None
        self._passes_left = dict.fromkeys(parameters, backward_passes_per_step)
        if model_sync_every is not None and parameters:
            ModelBucket(parameters)  # what does not fit fails here, not in the first step
        self._name = Name(process_set, [[names[p] for p in members] for members in planned])
        if process_set.included() and not is_alone(process_set):
            self._register_hooks()

    def _use_buckets(self, planned: Mapping[str, Sequence[torch.nn.Parameter]]) -> None:
        self.buckets = [GradientBucket(name, members, self._compression) for name, members in planned.items()]
        if not self._full:
            for bucket in self.buckets:
                # Wrong settings fail here, not in the first backward.
                self._config(torch.empty_like(bucket.flat, dtype=bucket.wire_dtype))
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}

    def _enter(self) -> None:
        """Begin anew in each generation of Horovod, as ranks that are new in it do."""
        if not self._tenure.enter():
            return
        self._model_syncs = -1  # the first step averages too, when no rank can be out of training
        self._owner = _attach.Owner()  # the buckets end when it is gone on every rank
        self._fusion = None
        name = self._name.current()
        buckets = {f"{name}.{index}": members for index, members in enumerate(self._planned)}
        if self._fusion_options is not None and self._names:
            self._fusion = Fusion(
                self._fusion_options,
                self._names,
                self.process_set,
                name,
                self._planned,
                self._wire_bytes,
            )
            self._use_buckets(buckets)  # a plan may have been in use
        for bucket, named in zip(self.buckets, buckets, strict=True):
            bucket.name = named
        if not self._full:
            runtime.own(self._owner, self.process_set.process_set_id, [*buckets, self._model_name])

    def _config(self, wire: torch.Tensor) -> Any:
        # Asked for anew in each step: an elastic job may have another size by then. Made once for each size.
        return make_config(
            dtype=wire.dtype,
            shape=tuple(wire.shape),
            device=device_number(wire.device),
            size=self.process_set.size(),
            prescale_factor=1.0 / self._predivide,
            postscale_factor=self._predivide,
            drop_nonfinite=True,
            drop_nonfinite_results=self._grad_scaler is not None,
            **self._bucket_options,
        )

    def _register_hooks(self) -> None:
        # The parameters hold the hooks, and must not hold the exchange with them.
        reference = weakref.ref(self)

        def gradient_is_there(parameter: torch.nn.Parameter) -> None:
            exchange = reference()
            if exchange is not None:
                exchange._gradient_is_there(parameter)

        for parameter in self._bucket_of:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(gradient_is_there))  # type: ignore[no-untyped-call]
        weakref.finalize(self, _remove, self._hooks)

    # --- Backward ------------------------------------------------------------------------------------------------

    def _gradient_is_there(self, parameter: torch.nn.Parameter) -> None:
        if self._passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self.synchronized = False  # of an earlier step, which a GradScaler has skipped
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] > 0:
            return
        if parameter.grad is not None and parameter.grad.is_sparse and not self._sparse_as_dense:
            raise ValueError(
                "buckets cannot hold sparse gradients; pass sparse_as_dense=True, or use Full() without fusion"
            )
        self._enter()
        if self._fusion is not None:
            self._fusion.gradient(parameter)
        bucket = self._bucket_of[parameter]
        if bucket.take(parameter):
            self._arrive(bucket)

    def _arrive(self, bucket: GradientBucket) -> None:
        if self._grad_scaler is not None and not self._full:
            self._scale = self._grad_scaler.get_scale()
        bucket.arrive(lambda wire: self._reduce(bucket.name, wire), self._scale)

    def _reduce(self, name: str, wire: torch.Tensor) -> PartialHandle | int:
        """Start a reduction in place."""
        if self._full:
            return mpi_ops.allreduce_async_(
                wire,
                name=name,
                op=self._bucket_options["op"],
                prescale_factor=1.0 / self._predivide,
                postscale_factor=self._predivide,
                process_set=self.process_set,
            )
        return submit(wire, wire, name, self.process_set, self._config(wire))

    # --- Fusion --------------------------------------------------------------------------------------------------

    def _reduce_probe(self, name: str, tensor: torch.Tensor) -> bool:
        handle = self._reduce(name, tensor)
        synchronize(handle)
        return isinstance(handle, int) or not handle.info().late

    def _wire_bytes(self, parameter: torch.nn.Parameter) -> int:
        return parameter.numel() * self._bucket_of[parameter].wire_dtype.itemsize

    def _maybe_replan(self, optimizer: Any) -> None:
        if self._fusion is None or not self._fusion.is_due():
            return
        collectives = Collectives(self.process_set, self._reduce_probe, self.buckets[0].flat.device)
        if not self._fusion.everybody_is_here(collectives):
            return
        self.flush_optimizer(optimizer)  # what is pending or missed in the old buckets belongs to them
        if self._fusion.replan(collectives):
            self._use_buckets(self._fusion.buckets)

    @property
    def fusion_plan(self) -> FusionPlan | None:
        return None if self._fusion is None else self._fusion.plan

    # --- Step ----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        self._synchronize(fold=True)

    def _synchronize(self, fold: bool) -> None:
        if self._hooks and not self.synchronized:
            self._enter()
            for bucket in self.buckets:
                if bucket.handle is None:
                    for parameter in list(bucket.missing):
                        bucket.take(parameter)
                    self._arrive(bucket)
            self._earlier = [bucket.finish(self._scale, fold) for bucket in self.buckets]
            if self._fusion is not None:
                self._fusion.synchronized()
            for bucket in self.buckets:
                bucket.reset()
            for parameter in self._passes_left:
                self._passes_left[parameter] = self._passes
        self.synchronized = True

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.synchronizes_in_step:
            if self.synchronized and self._grad_scaler is None:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=3,
                )
            self._synchronize(fold=False)
        earlier, self._earlier = self._earlier, []
        empty = [bucket for bucket in self.buckets if bucket.empty]
        with self._gradients_kept():
            self._replay(optimizer, earlier)
        # No result is no update: a step with zeros would move weights by momentum and decay.
        if len(empty) < len(self.buckets) or not self.buckets:
            with self._gradients_kept():
                for bucket in empty:
                    bucket.point_gradients_at(None)
                optimizer._base.step(optimizer)
        for bucket in empty:
            bucket.empty = False
        self.synchronized = False
        self._local_steps += 1
        self._maybe_sync_model()
        self._maybe_replan(optimizer)
        return loss

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        gradients = {p: p.grad for p in self._bucket_of}
        try:
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def _replay(self, optimizer: Any, results: list[list[torch.Tensor]]) -> None:
        """Apply results, a list for each bucket, oldest first; the newest of each bucket are applied together."""
        rounds = max(map(len, results), default=0)
        for index in range(rounds):
            for bucket, missed in zip(self.buckets, results, strict=True):
                at = index - (rounds - len(missed))
                bucket.point_gradients_at(missed[at] if at >= 0 else None)
            optimizer._base.step(optimizer)

    def before_zero_grad(self) -> None:
        if any(bucket.handle is not None for bucket in self.buckets):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        # A backward that failed half way leaves nothing behind.
        self._restart()

    def _restart(self) -> None:
        self.synchronized = False
        self._earlier = []
        for bucket in self.buckets:
            bucket.reset()
        self._passes_left = dict.fromkeys(self._passes_left, self._passes)

    def set_passes(self, passes: int) -> None:
        self._passes = passes
        self._passes_left = dict.fromkeys(self._passes_left, passes)

    # --- Rounds --------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        if self._full or not self._hooks:
            return self._local_steps  # every step is a round
        if not self._tenure.is_current:
            return 0
        if self._fusion is not None:
            return self._fusion.rounds
        process_set = self.process_set.process_set_id
        return min(runtime.completed(process_set, bucket.name) for bucket in self.buckets)

    def flush_optimizer(self, optimizer: Any) -> None:
        if any(bucket.handle is not None for bucket in self.buckets):
            raise AssertionError("optimizer.flush() was called after loss.backward() but before optimizer.step().")
        if self._full or not self._hooks:
            return
        process_set = self.process_set.process_set_id
        runtime.flush(process_set)
        if self._tenure.is_current:  # used, and since Horovod was initialised anew
            missed = [bucket.collect(process_set) for bucket in self.buckets]
            with self._gradients_kept():
                self._replay(optimizer, missed)
        self._flushed_at = self._local_steps

    @property
    def is_flushed(self) -> bool:
        if self._full or not self._hooks or not self._tenure.is_current or self._flushed_at == self._local_steps:
            return True
        return runtime.unsettled(self.process_set.process_set_id).isdisjoint(bucket.name for bucket in self.buckets)

    def _maybe_sync_model(self) -> None:
        if self._model_sync_every is None or not self._hooks:
            return
        due = self.rounds // self._model_sync_every
        if due <= self._model_syncs:
            return
        self._model_syncs = due
        model = ModelBucket(list(self._names))
        model.pack()
        # A late one is an average of older models, made while this rank was out of training.
        if not average_over_all_(model.flat, self._model_name, self.process_set).info().late:
            model.unpack()

    @property
    def _model_name(self) -> str:
        return f"{self._name.current()}.model"

    # --- State ---------------------------------------------------------------------------------------------------

    def before_state_dict(self) -> None:
        if self._has_warned or self.is_flushed:
            return
        self._has_warned = True
        warnings.warn(
            "optimizer.state_dict() was called while this rank has late gradients pending, or results that it has missed: "
            "call optimizer.flush() on every rank before, or the replicas that are saved differ",
            stacklevel=3,
        )

    def forget(self) -> None:
        if not runtime.failed and any(bucket.is_under_way for bucket in self.buckets):
            raise AssertionError(
                "optimizer.load_state_dict() was called after loss.backward() but before optimizer.step()."
            )
        for bucket in self.buckets:
            bucket.abandon()
        if self._tenure.is_current:
            for bucket in self.buckets:
                runtime.clear(self.process_set.process_set_id, bucket.name)
        self.synchronizes_in_step = True
        self._flushed_at = self._local_steps
        self._restart()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _check_groups(
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None, parameters: list[torch.nn.Parameter]
) -> Sequence[Sequence[torch.nn.Parameter]] | None:
    if groups is None:
        return None
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups < 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return split_list(parameters, groups) if groups > 0 else None
    seen: set[int] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")  # noqa: TRY004 (as Horovod)
            if id(parameter) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(parameter))
    return groups
