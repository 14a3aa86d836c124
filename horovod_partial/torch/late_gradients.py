"""Combines an optimizer's gradients over the ranks: eager-SGD (PPoPP'20, section 4), and merged gradients (MG-WFBP)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch

from horovod_partial.merging import MergingPlan
from horovod_partial.runtime.appliers import this_thread
from horovod_partial.torch.ahead import ParametersAhead
from horovod_partial.torch.buckets import GradientBucket
from horovod_partial.torch.devices import keep_for_stream
from horovod_partial.torch.micro_batches import evaluate
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.round_applier import RoundApplier


class Phase(Enum):
    """How far an optimizer has come with its present step."""

    COLLECTING = "gradients of the step may be in buckets, or have arrived"
    SHOWN = "the rank has waited for the step's round, and each `grad` is a result"
    LEFT = "after SHOWN a backward pass came, and no step"
    AHEAD = "the rounds up to that of the step were applied to a copy of the model, while the program waited"


class StepState(NamedTuple):
    """The state of an optimizer between two of its steps. A method named after an event returns the state after it.

    `has_result`: `grad` holds the result of a round, which no step has applied yet. `is_watched`: the program has seen
    this result, so the optimizer notices if the program changes it, or takes no step with it. `misses_more`: the next
    step will apply further missed rounds, too. Then either is an error, because it would affect only one of the rounds.
    """

    phase: Phase = Phase.COLLECTING
    has_result: bool = False
    is_watched: bool = False
    misses_more: bool = False

    @property
    def is_synchronized(self) -> bool:
        """Whether this step's round is over on this rank, so that `synchronize` and `step` need not wait."""
        return self.phase in (Phase.SHOWN, Phase.AHEAD)

    @property
    def waits_for_step(self) -> bool:
        """Whether the result of a round waits for the program's next step. Until this step, flushes apply no rounds."""
        return self.has_result or self.phase is Phase.AHEAD

    @property
    def allows_ahead(self) -> bool:
        """Whether a copy of the model may get missed rounds now. False while `grad` holds a result that is in use."""
        return not self.has_result and not (self.phase is Phase.SHOWN and self.is_watched)

    def gradient(self) -> StepState:
        """Return the state after backward has computed a gradient."""
        return self._replace(phase=Phase.LEFT) if self.phase is Phase.SHOWN else self

    def waited(self, *, has_result: bool) -> StepState:
        """Return the state after the step's round has ended on this rank."""
        return StepState(Phase.SHOWN, has_result)

    def watched(self, *, misses_more: bool) -> StepState:
        """Return the state after `synchronize` has shown the step's result to the program."""
        return self._replace(is_watched=True, misses_more=misses_more)

    def ahead(self) -> StepState:
        """Return the state after rounds, up to this step's, were applied to a copy of the model.

        `grad` shows the program the step's result.
        """
        return StepState(Phase.AHEAD, has_result=False, is_watched=True, misses_more=True)

    def applying(self, *, changed: bool) -> StepState:
        """Return the state when `step` begins to apply the result. If the step fails, the program may change `grad`.

        Raises RuntimeError if the program has `changed` the result, although this rank has missed further rounds.
        """
        if changed and self.misses_more:
            raise RuntimeError(CHANGED_BY_HAND)
        phase = Phase.SHOWN if self.phase is Phase.AHEAD else self.phase
        return StepState(phase, self.has_result)

    def left_out(self, *, had_late: bool) -> StepState:
        """Return the state after zero_grad, or another backward pass, has come instead of a step.

        `had_late` says whether this rank's gradients are late, or the result contains late gradients of some rank.
        Raises RuntimeError if the program had seen the result, and `had_late` is True or further rounds were missed.
        """
        if self.leaves_out and (self.misses_more or had_late):
            raise RuntimeError(LEFT_OUT)
        return StepState()

    @property
    def leaves_out(self) -> bool:
        """Whether zero_grad, or another backward pass, would now drop a result that the program has seen."""
        return self.is_watched and self.waits_for_step


class LateGradients(RoundApplier):
    """Combines an optimizer's gradients under a gradient policy. Implements `runtime.appliers.AheadApplier`.

    A late rank applies its missed rounds in its next step, or in a flush; or earlier, while the program waits for
    something else, to a copy of the model (`runtime.appliers.Meanwhile` says when). With `missed="latest"` it gets only
    the newest result, and never during such a wait.
    """

    shares_work = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._state = StepState()
        self._is_by_hand = False  # whether the program has changed a shown result, or has taken no step with it
        self._ahead = ParametersAhead()
        # A round that `apply_ahead` could not apply, for the next `step`: the results of its buckets, and how many
        # steps per rank they contain, on average. None if there is no such round.
        self._left: tuple[list[torch.Tensor], float] | None = None
        self._has_told = False  # whether `gradient` has raised the error about too many backward passes
        self._replays = self._set.options.replays
        self._passes_left = dict.fromkeys(self._set.bucket_of, self._passes)
        if self._set.travels:
            self._set.register_hooks(self)
            if self._replays:
                runtime.take_part_in_flushes(self)
                runtime.take_rounds_in_waits(self)

    @property
    def synchronized(self) -> bool:
        return self._state.is_synchronized

    @property
    def merging_plan(self) -> MergingPlan | None:
        return None if self._set.merging is None else self._set.merging.plan

    @property
    def rounds(self) -> int:
        return self._set.rounds if self._set.travels else self._local_steps  # without other ranks each step is a round

    def _enter(self) -> None:
        if not self._set.is_current:
            self._set.enter(self.replica)

    def gradient(self, parameter: torch.nn.Parameter) -> None:
        if self._passes_left[parameter] <= 0 or self._state.phase is Phase.AHEAD:
            self._has_told = True
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._state = self._state.gradient()
        self._enter()  # in the first pass: ranks compare parameters here, and SAM changes parameters between passes
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] > 0:
            return
        self._set.check_sparse(parameter)
        if self._set.merging is not None:
            self._set.merging.gradient(parameter)
        bucket = self._set.bucket_of[parameter]
        if bucket.take(parameter):
            self._arrive(bucket)

    def _arrive(self, bucket: GradientBucket) -> None:
        self._set.family.arrive(bucket, self._scale_on(bucket.flat.device) if self.unscales else None)

    def _scale_on(self, device: torch.device) -> torch.Tensor:
        """Return the present scale of the GradScaler. (Its `get_scale` would make the host wait for a GPU.)"""
        scaler = self._grad_scaler
        assert scaler is not None
        scale = scaler._scale  # None before the scaler's first use
        return torch.tensor(scaler.get_scale(), device=device) if scale is None else scale.to(device)

    def synchronize(self) -> None:
        self.work.require_last()
        if self._state.is_synchronized:
            return
        self._wait()
        if self._replays and self._set.travels:
            self._state = self._state.watched(misses_more=self._set.family.has_round)
            for bucket in self.buckets:
                bucket.watch(copies=self._state.misses_more)

    def _wait(self) -> None:
        """Submit the buckets that backward left incomplete, and wait for this step's round. Does so once in a step."""
        if self._state.is_synchronized:
            return
        if not self._set.travels:
            self._state = self._state.waited(has_result=False)
            return
        self._leave_out()
        self._enter()
        self.thread = this_thread()
        for bucket in self.buckets:
            if bucket.handle is None:
                for parameter in list(bucket.missing):
                    bucket.take(parameter)
                self._arrive(bucket)
        self._wait_for_buckets()
        self._set.tell()
        self._expect_gradients()

    def _wait_for_buckets(self) -> None:
        """Wait for this step's round. Then put a result into `grad`: with replay, the oldest that was not applied."""
        family = self._set.family
        with self._applying():
            unchanged = family.wait()
        if self._set.merging is not None:
            self._set.merging.synchronized()
        has_result = self._take_round() if self._replays else self._show(family.take_results(), steps=1.0)
        self._state = self._state.waited(has_result=has_result)
        if not all(unchanged) and not self._has_told:
            first = self.buckets[unchanged.index(False)].parameters[0]
            raise RuntimeError(
                f"gradients were changed after backward, while they travelled: {self._set.names[first]} or another one in its "
                "bucket. Pass max_grad_norm=, max_grad_value= or grad_transform= to hvd.DistributedOptimizer, or call "
                "optimizer.synchronize() before"
            )
        self._has_told = False

    def _take_round(self) -> bool:
        if self._left is None:
            return self._replays and self._set.travels and self._take_into_gradients()
        (flats, steps), self._left = self._left, None
        for bucket, flat in zip(self.buckets, flats, strict=True):
            bucket.flat.copy_(flat)
            keep_for_stream(flat)
            bucket.empty = False
        return self._show(True, steps=steps)

    def _apply_all(self, optimizer: Any, apply: Callable[[Any], None] | None = None) -> None:
        """Apply all rounds that this rank can take, oldest first. Stop if `apply` leaves one in `_left`."""
        while not (apply and self._left) and self._take_round():
            if self._is_by_hand:
                self._is_by_hand = False
                warnings.warn(CHANGED_BY_HAND, stacklevel=2)
            (apply or self._apply_round)(optimizer)

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        loss = evaluate(closure)
        if self._set.travels:
            self._set.check_layers(optimizer)
        if self.synchronizes_in_step:
            if self._state.phase is Phase.SHOWN and self._grad_scaler is None:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=4,
                )
            self._wait()
        if self._state.phase is Phase.AHEAD:
            self._expect_gradients()
        changed = any(bucket.was_changed() for bucket in self.buckets)
        self._watch_no_more()
        self._is_by_hand |= changed
        before, self._state = self._state, self._state.applying(changed=False)
        self._state = before.applying(changed=changed)
        self._set.family.disturb(self._ahead.become_the_model())
        if self._state.has_result or not self._set.travels:
            self._apply_round(optimizer)
        self._state = self._state._replace(has_result=False)
        if not changed:
            self._apply_all(optimizer)
        self._state = StepState()
        self._local_steps += 1
        self._note_queued()
        self._set.replan(lambda: self.flush_optimizer(optimizer))
        return loss

    def _watch_no_more(self) -> None:
        for bucket in self.buckets:
            bucket.watched = None

    def _leave_out(self) -> None:
        """Drop the result that `synchronize` may have shown, because the program goes on without a step."""
        before, self._state = self._state, self._state._replace(has_result=False, is_watched=False)
        self._watch_no_more()
        self._is_by_hand |= before.leaves_out
        self._state = before.left_out(had_late=any(bucket.had_late for bucket in self.buckets))

    def before_zero_grad(self) -> None:
        if any(bucket.handle is not None for bucket in self.buckets):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._leave_out()
        self._restart()  # expect all gradients anew, because a backward pass may have failed halfway

    def _restart(self) -> None:
        self._state = StepState()
        for bucket in self.buckets:
            bucket.reset()
        self._expect_gradients()

    def _expect_gradients(self) -> None:
        self._passes_left = dict.fromkeys(self._passes_left, self._passes)

    def set_passes(self, passes: int) -> None:
        self._passes = passes
        self._expect_gradients()

    def flush_optimizer(self, optimizer: Any) -> None:
        super().flush_optimizer(optimizer)
        # Without replay the policy has `missed="latest"`: apply only the newest missed result.
        if not self._replays and self._set.travels and self._set.is_current:
            with self._outside_of_steps(), self._gradients_kept():
                # 0 steps: schedules have counted this rank's own steps already
                if self._show(self._set.family.collect(), steps=0.0):
                    self._apply_round(optimizer)

    @property
    def is_flushed(self) -> bool:
        return not self.is_ahead and super().is_flushed

    def forget(self) -> None:
        if not runtime.failed and self._set.family.is_under_way:
            raise AssertionError(
                "optimizer.load_state_dict() was called after loss.backward() but before optimizer.step()."
            )
        self._set.forget()
        self.synchronizes_in_step = True
        self._flushed_at = self._local_steps
        self._ahead.forget()
        self._left = None
        self._restart()

    # The methods from here on, with some methods of the base class, implement `AheadApplier`.

    @property
    def is_under_way(self) -> bool:
        """Whether gradients of a backward pass, or the result of a round, wait for a step."""
        return self._state.waits_for_step or any(bucket.is_begun for bucket in self.buckets)

    def declare(self) -> None:
        if not self._set.is_current:
            self._enter()
            self._set.family.declare()

    def apply_rounds(self) -> None:
        if self.family is not None:
            self._set.family.disturb(self._ahead.become_the_model())
        super().apply_rounds()

    @property
    def applies_ahead(self) -> bool:
        """Whether rounds can be applied to a copy of the model now.

        They cannot while backward runs, while the program sees a result in `grad`, on a CUDA stream other than the
        default one, or while an optimizer of the package schedulefree is in evaluation mode.
        """
        if not self._state.allows_ahead or self.is_applying or self._left is not None:
            return False
        if torch._C._current_graph_task_id() != -1:
            return False
        device = self.buckets[0].flat.device
        if device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
            return False
        optimizer = self.wrapped
        if optimizer is None or not self._set.trained:
            return False
        if not all(group.get("train_mode", True) for group in optimizer.param_groups):
            return False
        return self._has_arrived or self._state.phase is Phase.AHEAD or not self.is_under_way

    @property
    def is_ahead(self) -> bool:
        return self._ahead.rounds > 0 or self._left is not None

    @property
    def _has_arrived(self) -> bool:
        """Whether this step's gradients have arrived in all buckets; always False for merged gradients."""
        return self._set.merging is None and all(bucket.handle is not None for bucket in self.buckets)

    def apply_ahead(self) -> None:
        """Apply all rounds that this rank can take to a copy of the model. The next step or flush changes the model.

        If this rank has already arrived with a step's gradients, this does nothing until that step's round has ended.
        Then this round is applied too, and `grad` shows the step's result, same as after `synchronize`.
        """
        if self._has_arrived and self._set.family.is_under_way:
            return
        optimizer = self.wrapped
        with self._outside_of_steps(), self._ahead.in_place_of(self._set.trained):
            has_result = False
            if self._has_arrived:
                self._wait_for_buckets()
                has_result, self._state = self._state.has_result, self._state.ahead()
            if self._state.phase is not Phase.AHEAD:
                with self._gradients_kept():
                    self._apply_all(optimizer, self._try_round)
                return
            shown = [bucket.flat.clone() for bucket in self.buckets]
            try:
                if has_result:
                    self._try_round(optimizer)
                self._apply_all(optimizer, self._try_round)
            finally:
                for bucket, flat in zip(self.buckets, shown, strict=True):
                    bucket.flat.copy_(flat)
                    bucket.show(self._set.frozen)
                    bucket.watch(copies=True)
                self._state = self._state.ahead()

    def _try_round(self, optimizer: Any) -> None:
        """Apply a round to the copy of the model. If the optimizer's step fails, keep the round for the next `step`."""
        left = [bucket.flat.clone() for bucket in self.buckets], self._steps_in_round
        try:
            self._apply_round(optimizer)
            self._ahead.rounds += 1
        except Exception:  # noqa: BLE001 - if the round fails again, the program's own step raises the error
            self._left = left
            self._set.family.disturb(1)  # count the round as lost: the failed step may have written parameters


CHANGED_BY_HAND = (
    "gradients were changed by hand after optimizer.synchronize(), and this rank has missed rounds, or has waited for a second "
    "while the optimizer has round hooks. The gradients of these rounds are not changed so: replicas may part. Let the optimizer do it for each round: "
    "hvd.DistributedOptimizer(..., max_grad_norm=1.0), or max_grad_value= or grad_transform="
)

LEFT_OUT = (
    "the result of a round was shown by optimizer.synchronize(), and zero_grad() or another backward pass came before a step with "
    "it. But a rank was late: its gradients of this step will be in a later round, or its gradients of an earlier step were in this one, "
    "and are lost. To accumulate several backward passes, pass backward_passes_per_step= to hvd.DistributedOptimizer, and synchronize "
    "after the last pass only. If these gradients were made by the loss of another optimizer, as with a GAN, call "
    "requires_grad_(False) on this optimizer's model around that backward pass (examples/torch/cookbook/gan.py). To leave gradients "
    "out by their values, pass grad_transform="
)
