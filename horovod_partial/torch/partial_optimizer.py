"""The optimizer of the partial policies (eager-SGD, PPoPP'20, section 3)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from horovod.common.util import split_list
from horovod.torch.mpi_ops import Average

from horovod_partial.policies import Quorum
from horovod_partial.torch import buckets
from horovod_partial.torch.buckets import GradientBucket
from horovod_partial.torch.full_optimizer import unwrapped
from horovod_partial.torch.operations import make_config, partial_allreduce_, runtime


def wrap(
    optimizer: torch.optim.Optimizer,
    *,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    compression: Any,
    backward_passes_per_step: int,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None,
    sparse_as_dense: bool,
    process_set: ProcessSet,
    model_sync_every: int | None,
    grad_scaler: torch.amp.GradScaler | None,
    bucket_options: dict[str, Any],
) -> torch.optim.Optimizer:
    """An instance of a subclass of the optimizer's class that shares its state and parameter groups."""
    base = type(optimizer)
    if issubclass(base, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates its closure several times a step, which a partial policy cannot follow; use Full()"
        )
    check_names(optimizer, named_parameters)
    # Horovod's broadcast_optimizer_state knows a wrapper, whose step would reduce, by this module's name.
    members = {**vars(_Methods), "__module__": "horovod.torch.optimizer", "_base": base}
    instance: Any = object.__new__(type(base.__name__, (base,), members))
    # A scheduler that was made before has put its own `step` on the instance, and would go on calling the bare one.
    instance.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    instance._start(
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        model_sync_every=model_sync_every,
        grad_scaler=grad_scaler,
        bucket_options=bucket_options,
    )
    return instance


def check_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> None:
    """Horovod's checks of `named_parameters`, with its messages. Buckets have names of their own."""
    if named_parameters is None:
        return
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
        )
    names = [name for name, _ in named]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    known = {id(parameter) for _, parameter in named}
    unnamed = [id(p) for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(map(str, unnamed))}"
        )


class _Methods(torch.optim.Optimizer):
    """Never made: becomes the body of a subclass of the wrapped optimizer's class, which is `_base`.

    Hooks run in the threads of autograd, everything else in the application's; backward has ended before the
    application goes on, so they never run at the same time, and nothing here needs a lock.
    """

    is_horovod_partial = True
    _base: Any  # the wrapped optimizer's class
    _instances = 0  # makes bucket names unique; the ranks make their optimizers in the same order

    def _start(
        self,
        *,
        compression: Any,
        backward_passes_per_step: int,
        groups: Any,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        model_sync_every: int | None,
        grad_scaler: torch.amp.GradScaler | None,
        bucket_options: dict[str, Any],
    ) -> None:
        from horovod_partial.settings import settings

        self.process_set = process_set
        self.backward_passes_per_step = backward_passes_per_step
        self._sparse_as_dense = sparse_as_dense
        self._model_sync_every = model_sync_every
        self._model_syncs = 0
        self._grad_scaler = grad_scaler
        self._scale = 1.0
        self._synchronized = False
        self._should_synchronize = True
        self._earlier: list[list[torch.Tensor]] = []
        self._hooks: list[Any] = []
        self._name = f"DistributedOptimizer.{_Methods._instances}"
        _Methods._instances += 1

        options = dict(bucket_options)
        predivide = options.pop("gradient_predivide_factor")
        if predivide != 1.0 and options["op"] != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        planned = buckets.plan(parameters, _check_groups(groups, parameters), settings().bucket_mb * 1e6)
        self._buckets = [
            GradientBucket(f"{self._name}.{index}", members, compression) for index, members in enumerate(planned)
        ]
        self._configs = {
            bucket.name: make_config(
                dtype=bucket.wire_dtype,
                shape=tuple(bucket.flat.shape),
                size=process_set.size(),
                prescale_factor=1.0 / predivide,
                postscale_factor=predivide,
                drop_nonfinite=True,
                **options,
            )
            for bucket in self._buckets
        }
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._passes_left = dict.fromkeys(parameters, backward_passes_per_step)
        if process_set.included() and process_set.size() > 1:
            for parameter in parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient_is_there))
        if grad_scaler is not None:
            self._synchronize_before_unscaling(grad_scaler)

    # --- Backward ------------------------------------------------------------------------------------------------

    def _gradient_is_there(self, parameter: torch.nn.Parameter) -> None:
        if self._passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._synchronized = False  # of an earlier step, which a GradScaler has skipped
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] > 0:
            return
        if parameter.grad is not None and parameter.grad.is_sparse and not self._sparse_as_dense:
            raise ValueError(
                "a partial policy cannot reduce sparse gradients; pass sparse_as_dense=True, or use Full()"
            )
        bucket = self._bucket_of[parameter]
        if bucket.take(parameter):
            self._arrive(bucket)

    def _arrive(self, bucket: GradientBucket) -> None:
        if self._grad_scaler is not None:
            self._scale = self._grad_scaler.get_scale()
        bucket.arrive(self.process_set.process_set_id, self._configs[bucket.name], self._scale)

    # --- Step ----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every bucket has its result; the parameters' `grad` hold it then.

        Gradients that backward did not make count as zeros, as in Horovod.
        """
        if self._hooks and not self._synchronized:
            for bucket in self._buckets:
                if bucket.handle is None:
                    for parameter in list(bucket.missing):
                        bucket.take(parameter)
                    self._arrive(bucket)
            self._earlier = [bucket.finish(self._scale) for bucket in self._buckets]
            for bucket in self._buckets:
                bucket.reset()
            for parameter in self._passes_left:
                self._passes_left[parameter] = self.backward_passes_per_step
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context `step` does not synchronize: for gradient clipping after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then apply: first the results that were missed (with `missed="replay"`), then the newest.

        `closure` is evaluated once, before the reduction.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._should_synchronize:
            if self._synchronized and self._grad_scaler is None:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        earlier, self._earlier = self._earlier, []
        if any(earlier):
            newest = {p: p.grad for p in self._bucket_of}
            self._replay(earlier)
            for parameter, gradient in newest.items():
                parameter.grad = gradient
        self._base.step(self)
        self._synchronized = False
        self._maybe_sync_model()
        return loss

    def _replay(self, results: list[list[torch.Tensor]]) -> None:
        """Apply results, a list for each bucket, oldest first; the newest of each bucket are applied together."""
        rounds = max(map(len, results))
        for index in range(rounds):
            for bucket, missed in zip(self._buckets, results, strict=True):
                at = index - (rounds - len(missed))
                bucket.point_gradients_at(missed[at] if at >= 0 else None)
            self._base.step(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's.

        Raises:
            AssertionError: gradients are under way; call it after `step` or `synchronize`.
        """
        if any(bucket.handle is not None for bucket in self._buckets):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._synchronized = False
        self._base.zero_grad(self, set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As Horovod's: how many backward passes accumulate before a step."""
        self.backward_passes_per_step = passes
        self._passes_left = dict.fromkeys(self._passes_left, passes)

    # --- Rounds --------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Rounds that all buckets have completed: the clock that the ranks share, for schedules and for stopping."""
        if not self._hooks:
            return 0
        process_set = self.process_set.process_set_id
        return min(runtime.completed(process_set, bucket.name) for bucket in self._buckets)

    def flush(self) -> None:
        """Wait until every rank flushes, deliver everything pending, and apply what this rank has missed.

        Call it on every rank before a checkpoint; ranks that have ended or joined need not come.

        Raises:
            AssertionError: gradients are under way; call it after `step`.
        """
        if any(bucket.handle is not None for bucket in self._buckets):
            raise AssertionError("optimizer.flush() was called after loss.backward() but before optimizer.step().")
        if not self._hooks:
            return
        process_set = self.process_set.process_set_id
        runtime.flush(process_set)
        missed = [bucket.collect(process_set) for bucket in self._buckets]
        if any(missed):
            gradients = {p: p.grad for p in self._bucket_of}
            self._replay(missed)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def _maybe_sync_model(self) -> None:
        if self._model_sync_every is None or not self._hooks:
            return
        due = self.rounds // self._model_sync_every
        if due <= self._model_syncs:
            return
        self._model_syncs = due
        with torch.no_grad():
            for bucket in self._buckets:
                sizes = [p.numel() for p in bucket.parameters]
                model = torch.cat([p.detach().reshape(-1) for p in bucket.parameters])
                # All ranks, but those that have ended, whose models do not count either.
                partial_allreduce_(
                    model,
                    name=f"{bucket.name}.model",
                    sync=Quorum(1.0),
                    missed="latest",
                    divisor="contributors",
                    process_set=self.process_set,
                )
                for parameter, average in zip(bucket.parameters, torch.split(model, sizes), strict=True):
                    parameter.copy_(average.view_as(parameter))

    # --- State ---------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's; what this rank has pending or has missed is forgotten."""
        if any(bucket.handle is not None for bucket in self._buckets):
            raise AssertionError(
                "optimizer.load_state_dict() was called after loss.backward() but before optimizer.step()."
            )
        if self._hooks:
            runtime.clear(self.process_set.process_set_id)
        self._synchronized = False
        self._should_synchronize = True
        self._earlier = []
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        self._base.load_state_dict(self, state_dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return unwrapped(self, self._base)

    # --- Mixed precision -----------------------------------------------------------------------------------------

    def _synchronize_before_unscaling(self, scaler: torch.amp.GradScaler) -> None:
        unscale = scaler.unscale_

        def synchronize_and_unscale(optimizer: torch.optim.Optimizer) -> None:
            if optimizer is self:
                self.synchronize()
            unscale(optimizer)

        scaler.unscale_ = synchronize_and_unscale  # type: ignore[method-assign]


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
                raise ValueError("groups must consist of torch.Tensor.")
            if id(parameter) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(parameter))
    return groups
