"""Packs gradients into buckets and reduces them over the ranks before an optimizer's step, in PyTorch.

Partial policies (eager-SGD, PPoPP'20, section 4) and merged gradients (MG-WFBP) use this.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from horovod.common.util import split_list
from horovod.torch.mpi_ops import Average

from horovod_partial import _attach
from horovod_partial.merging import MergedGradients, MergingPlan
from horovod_partial.runtime import bucket_config, healing
from horovod_partial.runtime.appliers import NO_THREAD, this_thread
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.settings import settings
from horovod_partial.torch import buckets
from horovod_partial.torch.ahead import ParametersAhead
from horovod_partial.torch.buckets import GradientBucket
from horovod_partial.torch.devices import refuse_capture
from horovod_partial.torch.family import GradientFamily
from horovod_partial.torch.merging import Collectives, Merging
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.replica import ReplicaState
from horovod_partial.torch.round_steps import RoundSteps
from horovod_partial.torch.shown_result import ShownResult
from horovod_partial.torch.wrapping import Exchange, Name


class GradientExchange(Exchange):
    """Combines an optimizer's gradients over the ranks, under a gradient policy.

    Gradient hooks run in autograd's threads, everything else runs in the application's threads. The application goes on
    only after backward has ended. So the two never run at the same time, and nothing here needs a lock.

    `bucket_options` has arguments of `make_config`, and `gradient_predivide_factor`. Most other arguments are those of
    `hvd.DistributedOptimizer`. If one does not suit the optimizer, this raises ValueError.
    """

    bucket_class = GradientBucket
    shares_work = False

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
        grad_scaler: torch.amp.GradScaler | None,
        merging: MergedGradients | None,
        round_steps: RoundSteps,
        bucket_options: dict[str, Any],
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS evaluates its closure several times a step, which buckets cannot follow; use Full() without merging"
            )
        predivide = bucket_options.pop("gradient_predivide_factor")
        if predivide != 1.0 and bucket_options["op"] != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        travels = process_set.included() and not runtime.is_alone(process_set)
        scales = grad_scaler is not None and grad_scaler.is_enabled()
        agreed = {"grad_scaler": "a scaler" if scales else None} | round_steps.agreed
        agreed["merging"] = None if merging is None else merging.agreed
        self.process_set = process_set
        self.round_steps = round_steps
        self.synchronized = False
        self.overflows: list[bool] = []
        self.thread = NO_THREAD  # the thread that took the last step
        self.unscales = travels and scales  # whether contributions are divided by the GradScaler's scale
        self._grad_scaler = grad_scaler
        self._scale = 1.0
        self._passes = backward_passes_per_step
        self._sparse_as_dense = sparse_as_dense
        self._compression = compression
        self._replays = bucket_options["missed"] == "replay"
        self._bucket_options = bucket_options | {
            "prescale_factor": 1.0 / predivide,
            "postscale_factor": predivide,
            # With a GradScaler, non-finite gradients travel too, so every rank skips the round and lowers the scale.
            "drop_nonfinite": not self.unscales,
            "agreed": tuple(f"{name}={value}" for name, value in agreed.items() if value is not None),
        }
        self._tenure = Tenure(runtime)  # the generation of Horovod that the buckets belong to
        self._introduction: healing.Introduction | None = None  # compares the parameters of all ranks at the start
        self._hooks: list[Any] = []

        self._came_from: int | None = None  # the rank that all parameters were broadcast from since the last round
        self._local_steps = 0
        self._flushed_at = 0  # how many steps this rank had taken at the last flush
        self._has_result = False  # whether the parameters' gradients are a round's result that has not been applied
        self._steps_in_round = 1.0  # how many steps per rank, on average, the result of the newest round contains
        self._shown = ShownResult()
        self._ahead = ParametersAhead()
        self.is_applying = False  # whether a round is being applied or waited for; if so, none is applied ahead
        self._is_ahead_of_step = False  # whether `apply_ahead` has taken the rounds up to that of this step's gradients
        # The results of a round whose step has failed in `apply_ahead`, and how many steps they are of; `step` takes it.
        self._left: tuple[list[torch.Tensor], float] | None = None
        self._has_told = False  # whether too many backward passes before a step have raised an error
        self._has_warned = False  # whether the warning about `state_dict` without a flush was given

        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._planned = buckets.plan(parameters, _check_groups(groups, parameters), settings().bucket_mb * 1e6)
        self._names = {parameter: names[parameter] for parameter in parameters}
        self._all_names = names  # the names of all parameters, including frozen ones
        self._frozen: set[torch.nn.Parameter] = set()  # parameters frozen since the optimizer was wrapped
        self._passes_left = dict.fromkeys(parameters, backward_passes_per_step)
        self._merging_options = merging
        self._merging: Merging | None = None
        self._use_buckets({str(index): members for index, members in enumerate(self._planned)})
        self._name = Name(process_set, [[names[p] for p in members] for members in self._planned])
        if travels:
            self._register_hooks()
            if self._replays:
                runtime.take_part_in_flushes(self)

    def _use_buckets(self, planned: Mapping[str, Sequence[torch.nn.Parameter]]) -> None:
        self.buckets = [
            self.bucket_class(name, parameters, self._compression, self._described(parameters), unscaled=self.unscales)
            for name, parameters in planned.items()
        ]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._family = GradientFamily(self.process_set, self.buckets, self._bucket_options)

    def _described(self, parameters: Sequence[torch.nn.Parameter]) -> list[str]:
        """Return a text for each parameter of a bucket, in the model's order. Ranks compare these texts."""
        return [bucket_config.member(self._names[parameter], parameter.shape) for parameter in reversed(parameters)]

    def _enter(self) -> None:
        """Name the buckets anew in each generation of Horovod, because new ranks begin to number optimizers at 1."""
        if not self._tenure.enter():
            return
        self._owner = _attach.Owner()  # when every rank has deleted its `Owner`, the buckets end
        self._merging = None
        name = self._name.current()
        buckets = {f"{name}.{index}": members for index, members in enumerate(self._planned)}
        if self._merging_options is not None and self._names:
            self._merging = Merging(
                self._merging_options,
                self._names,
                self.process_set,
                name,
                self._planned,
                self._wire_bytes,
            )
            self._use_buckets(buckets)  # this replaces buckets that an earlier merging plan may have made
        else:
            for bucket, named in zip(self.buckets, buckets, strict=True):
                bucket.name = named
            self._family = GradientFamily(self.process_set, self.buckets, self._bucket_options)
        start = f"{bucket_config.INTERNAL}start.{name}"
        owned = [start] if self._merging is not None else [*buckets, start]  # buckets of `Merging` have another owner
        runtime.family(self.process_set, owned).own(self._owner)
        if self._replays:
            meeting, replica = runtime.meet(self.process_set), self.replica
            if meeting is not None and replica is not None:
                self._introduction = healing.Introduction(meeting, start, replica.parameters())

    def _register_hooks(self) -> None:
        # The parameters keep the gradient hooks alive. The hooks refer weakly to the exchange, so that it can be freed.
        reference = weakref.ref(self)
        one_at_a_time = threading.Lock()  # autograd has a thread for each device, and a program may have several too

        def gradient_is_there(parameter: torch.nn.Parameter) -> None:
            exchange = reference()
            if exchange is not None:
                refuse_capture(parameter.device)  # before anything of the gradient is noted
                with one_at_a_time:
                    exchange._gradient_is_there(parameter)

        for parameter in self._bucket_of:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(gradient_is_there))  # type: ignore[no-untyped-call]
        weakref.finalize(self, _remove, self._hooks)

    def _gradient_is_there(self, parameter: torch.nn.Parameter) -> None:
        if self._passes_left[parameter] <= 0:
            self._has_told = True
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self.synchronized = False  # `synchronized` is still True if a GradScaler skipped the previous step
        self._enter()  # in the first pass, since a program may change parameters between two passes, as for SAM
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] > 0:
            return
        if parameter.grad is not None and parameter.grad.is_sparse and not self._sparse_as_dense:
            raise ValueError(
                "buckets cannot hold sparse gradients; pass sparse_as_dense=True, or use Full() without merging"
            )
        if self._merging is not None:
            self._merging.gradient(parameter)
        bucket = self._bucket_of[parameter]
        if bucket.take(parameter):
            self._arrive(bucket)

    def _arrive(self, bucket: GradientBucket) -> None:
        if self.unscales:
            assert self._grad_scaler is not None
            self._scale = self._grad_scaler.get_scale()
        self._family.arrive(bucket, self._scale)

    def _reduce_probe(self, name: str, tensor: torch.Tensor) -> bool:
        handle = self._family.submit(name, tensor, missed="sum")
        handle.synchronize()
        return not handle.info().late

    def _wire_bytes(self, parameter: torch.nn.Parameter) -> int:
        return parameter.numel() * self._bucket_of[parameter].wire_dtype.itemsize

    def _maybe_replan(self, optimizer: Any) -> None:
        if self._merging is None or not self._merging.is_due():
            return
        collectives = Collectives(self.process_set, self._reduce_probe, self.buckets[0].flat.device)
        if not self._merging.everybody_is_here(collectives):
            self._merging.postpone()
            return
        self.flush_optimizer(optimizer)  # late contributions must be delivered before their buckets are replaced
        if self._merging.replan(collectives):
            self._use_buckets(self._merging.buckets)

    @property
    def merging_plan(self) -> MergingPlan | None:
        return None if self._merging is None else self._merging.plan

    def synchronize(self) -> None:
        if self.synchronized:
            return
        self._synchronize()
        if self._replays and self._hooks:
            self._shown.show(self.buckets, misses_more=self._family.has_round)

    def _synchronize(self) -> None:
        if self._hooks and not self.synchronized:
            self._leave_round_out()
            self._enter()
            self.thread = this_thread()
            for bucket in self.buckets:
                if bucket.handle is None:
                    for parameter in list(bucket.missing):
                        bucket.take(parameter)
                    self._arrive(bucket)
            self._wait_for_buckets()
            if self._introduction is not None:
                self._introduction.tell(claims=True)
            self._passes_left = dict.fromkeys(self._passes_left, self._passes)
        self.synchronized = True

    def _wait_for_buckets(self) -> None:
        """Wait for this step's round. Gradients become its result, or with replay the oldest round not taken yet."""
        with self._applying():
            unchanged = self._family.wait()
        if self._merging is not None:
            self._merging.synchronized()
        self._has_result = self._take_round() if self._replays else self._show(self._family.take_results(), steps=1.0)
        self.synchronized = True
        if not all(unchanged) and not self._has_told:
            first = self.buckets[unchanged.index(False)].parameters[0]
            raise RuntimeError(
                f"gradients were changed after backward, while they travelled: {self._names[first]} or another one in its "
                "bucket. Pass max_grad_norm=, max_grad_value= or grad_transform= to hvd.DistributedOptimizer, or call "
                "optimizer.synchronize() before"
            )
        self._has_told = False

    def _take_round(self) -> bool:
        """Put the oldest round that this rank has not taken into the gradients. Returns False if there is none."""
        if self._left is not None:
            (flats, steps), self._left = self._left, None
            for bucket, flat in zip(self.buckets, flats, strict=True):
                bucket.flat.copy_(flat)
                bucket.empty = False
            return self._show(True, steps=steps)
        gradients = self._family.take_into_buckets()
        return gradients > 0 and self._show(True, steps=runtime.steps_of(self._family, gradients))

    def _show(self, has_result: bool, *, steps: float) -> bool:
        """Let each `grad` be what its bucket holds, from `steps` steps per rank on average. Returns `has_result`."""
        self._steps_in_round = steps
        self._family.show(self._frozen)
        return has_result

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._hooks:
            self._check_layers(optimizer)
        if self.synchronizes_in_step:
            if self.synchronized and self._grad_scaler is None and not self._is_ahead_of_step:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=3,
                )
            self._synchronize()
        if self._is_ahead_of_step:
            self._is_ahead_of_step = False
            self._passes_left = dict.fromkeys(self._passes_left, self._passes)
        changed = self._shown.was_changed(self.buckets)
        self._family.disturb(self._ahead.become_the_model())
        if self._has_result or not self._hooks:
            self._apply_round(optimizer)
        self._has_result = False
        if not changed:
            self._apply_all(optimizer)
        self.synchronized = False
        self._local_steps += 1
        self._maybe_replan(optimizer)
        return loss

    def _check_layers(self, optimizer: Any) -> None:
        """Note frozen parameters. Raises RuntimeError if a parameter in no bucket needs gradients now."""
        new = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and p not in self._bucket_of
        ]
        if new:
            raise RuntimeError(
                f"{self._all_names.get(new[0], 'a parameter')} needs gradients now, and did not when the optimizer was wrapped, "
                "so they would not be reduced: call optimizer.flush(), then wrap an optimizer of what is trained from now on"
            )
        self._frozen = {parameter for parameter in self._bucket_of if not parameter.requires_grad}

    def _leave_round_out(self) -> None:
        """Forget the result of a round that `synchronize` has shown, if the program has taken no step with it."""
        has_result, self._has_result = self._has_result, False
        if has_result or self._is_ahead_of_step:
            self._shown.leave_out(had_late=self._is_ahead_of_step or self._family.had_late)
        else:
            self._shown.forget()

    def _apply_round(self, optimizer: Any) -> None:
        """Take one step of the user's optimizer with the gradients of a round."""
        overflow = self.unscales and not all(bool(torch.isfinite(bucket.flat).all()) for bucket in self.buckets)
        if not overflow:
            self._came_from = None
            with self._applying():
                self.round_steps.before(optimizer, self._steps_in_round)
                optimizer._base.step(optimizer)
                self.round_steps.after(optimizer)
        if self.unscales:
            self.overflows.append(overflow)

    # The methods from here to `apply_ahead` implement `horovod_partial.runtime.appliers.Applier`.

    @property
    def family(self) -> GradientFamily | None:
        is_there = self._tenure.is_current and self.process_set.process_set_id is not None
        return self._family if is_there and self.buckets else None

    @property
    def is_under_way(self) -> bool:
        """Whether gradients of a backward pass, or the result of a round, wait for a step."""
        return self._has_result or self._is_ahead_of_step or self._family.is_begun

    @property
    def replica(self) -> ReplicaState | None:
        optimizer = self.wrapped()
        if optimizer is None or not self._replays:
            return None
        return ReplicaState(optimizer, self._names, self.round_steps.followers)

    def stop_reducing(self) -> None:
        _remove(self._hooks)

    def declare(self) -> None:
        if not self._hooks or self._tenure.is_current:
            return
        self._enter()
        self._family.declare()

    def apply_rounds(self) -> None:
        """Apply all rounds that this rank can take, oldest first. Call this only between two steps."""
        optimizer = self.wrapped()
        if not self._replays or self.family is None or not self._hooks or optimizer is None:
            return
        self._family.disturb(self._ahead.become_the_model())
        with self._gradients_kept():
            self._apply_all(optimizer)
        if self.overflows and self._grad_scaler is not None:
            self._grad_scaler.update()

    @property
    def applies_ahead(self) -> bool:
        """Whether rounds can be applied to a copy of the model now.

        They cannot while backward runs, while the user sees a result, on a CUDA stream other than the default one, or
        while the optimizer is not in training, as those of schedulefree say.
        """
        if not self._replays or not self._hooks or self._has_result or self.is_applying or self._left is not None:
            return False
        # After `synchronize` the user sees gradients and may change them before `step`, so no round may overwrite them.
        if self.synchronized and not self._is_ahead_of_step and self._shown:
            return False
        if torch._C._current_graph_task_id() != -1:
            return False
        device = self.buckets[0].flat.device if self.buckets else torch.device("cpu")
        if device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
            return False
        optimizer = self.wrapped()
        if optimizer is None or not self._trained or not all(g.get("train_mode", True) for g in optimizer.param_groups):
            return False
        return self._has_arrived or self._is_ahead_of_step or not self.is_under_way

    @property
    def is_ahead(self) -> bool:
        return self._ahead.rounds > 0 or self._left is not None

    @property
    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._bucket_of if parameter not in self._frozen]

    @property
    def _has_arrived(self) -> bool:
        """Whether this step's gradients have arrived in all buckets; always False for merged gradients."""
        return self._merging is None and self._family.have_arrived

    def apply_ahead(self) -> None:
        """Apply to a copy of the model all rounds that this rank can take. The next step or flush makes it the model.

        If this step's gradients have arrived, nothing is applied before their round has ended. Then that round is
        applied too, and the parameters' gradients become the result that `synchronize` would show.
        """
        optimizer = self.wrapped()
        with self._ahead.in_place_of(self._trained):
            if self._has_arrived:
                if self._family.is_under_way:
                    return
                self._wait_for_buckets()
                self._is_ahead_of_step = True
            if not self._is_ahead_of_step:
                with self._gradients_kept():
                    self._apply_all(optimizer, self._try_round)
                return
            shown = [bucket.flat.clone() for bucket in self.buckets]
            has_result, self._has_result = self._has_result, False
            try:
                if has_result:
                    self._try_round(optimizer)
                self._apply_all(optimizer, self._try_round)
            finally:
                for bucket, flat in zip(self.buckets, shown, strict=True):
                    bucket.flat.copy_(flat)
                self._family.show(self._frozen)
                self._shown.show(self.buckets, misses_more=True)

    def _try_round(self, optimizer: Any) -> None:
        """Apply a round to the copy of the model. If that fails, leave it to the program's next step."""
        left = [bucket.flat.clone() for bucket in self.buckets], self._steps_in_round
        try:
            self._apply_round(optimizer)
            self._ahead.rounds += 1
        except Exception:  # noqa: BLE001 - if it fails again, the program's own step raises the error
            self._left = left
            self._family.disturb(1)  # it may have written some parameters

    @contextmanager
    def _applying(self) -> Iterator[None]:
        before, self.is_applying = self.is_applying, True
        try:
            yield
        finally:
            self.is_applying = before

    def _apply_all(self, optimizer: Any, apply: Callable[[Any], None] | None = None) -> None:
        """Apply all rounds that this rank can take, oldest first. With `_try_round`, until one fails."""
        while self._replays and self._hooks and not (apply and self._left) and self._take_round():
            self._shown.warn_of_missed_round()
            (apply or self._apply_round)(optimizer)

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Context after which the parameters' gradients are as before it, so that backward passes can add to them."""
        gradients = {p: None if p.grad is None else p.grad.clone() for p in self._bucket_of}
        try:
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def succeed(self, before: Exchange) -> None:
        assert isinstance(before, GradientExchange)
        self.overflows = before.overflows
        self.thread = before.thread
        self.synchronizes_in_step = before.synchronizes_in_step

    def before_zero_grad(self) -> None:
        if any(bucket.handle is not None for bucket in self.buckets):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._leave_round_out()
        # Expect all gradients anew, because a backward pass may have failed halfway.
        self._restart()

    def _restart(self) -> None:
        self.synchronized = self._is_ahead_of_step = self._has_result = False
        self._shown.forget()
        self._family.reset()
        self._passes_left = dict.fromkeys(self._passes_left, self._passes)

    def parameters_came(self, sent: Container[int], root: int) -> None:
        """Note that the tensors at the addresses `sent` have come from rank `root`, in a broadcast."""
        if self.family is None or not all(parameter.data_ptr() in sent for parameter in self._all_names):
            return
        self._came_from = root
        optimizer = self.wrapped()
        if optimizer is not None and not optimizer.state:
            self.state_came(root)

    def state_came(self, root: int) -> None:
        """Note that the optimizer's state has come from rank `root`. Its rounds are not lost if the parameters have, too."""
        if self.family is not None and self._came_from == root:
            self.family.count_anew()

    def set_passes(self, passes: int) -> None:
        self._passes = passes
        self._passes_left = dict.fromkeys(self._passes_left, passes)

    @property
    def rounds(self) -> int:
        if not self._hooks:
            return self._local_steps  # without other ranks every step counts as a round
        if not self._tenure.is_current:
            return 0
        return self._merging.rounds if self._merging is not None else self._family.taken

    def flush_optimizer(self, optimizer: Any) -> None:
        if self.is_under_way:
            raise AssertionError("optimizer.flush() was called after loss.backward() but before optimizer.step().")
        if not self._hooks:
            return
        if self._replays:
            self.thread = this_thread()
        runtime.flush(self.process_set.process_set_id)
        if not self._replays and self._tenure.is_current:  # without replay, the sums of missed results are applied
            has_result = self._family.collect()
            with self._gradients_kept():
                if self._show(has_result, steps=0.0):  # 0 steps: learning rate schedules have counted them already
                    self._apply_round(optimizer)
        self._flushed_at = self._local_steps

    @property
    def is_flushed(self) -> bool:
        if self._ahead:
            return False
        if not self._hooks or self.family is None or self._flushed_at == self._local_steps:
            return True
        return runtime.unsettled(self.process_set.process_set_id).isdisjoint(self._family.names)

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
        if not runtime.failed and self._family.is_under_way:
            raise AssertionError(
                "optimizer.load_state_dict() was called after loss.backward() but before optimizer.step()."
            )
        self._family.abandon()
        if self._tenure.is_current:
            self._family.clear()
        self.synchronizes_in_step = True
        self._flushed_at = self._local_steps
        self._ahead.forget()
        self._left = None
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
        return split_list(parameters, groups) if groups else None
    grouped = [id(parameter) for group in groups for parameter in group]
    if len(set(grouped)) < len(grouped):
        raise ValueError("A parameter can only appear once in groups.")
    return groups
