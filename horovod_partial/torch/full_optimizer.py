"""`hvd.DistributedOptimizer` of PyTorch under `hvd.Full()`: Horovod's own optimizer, with its known defects mended."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import horovod.torch.optimizer as horovod_optimizer
import torch
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch import mpi_ops

from horovod_partial.torch.buckets import Widened
from horovod_partial.torch.micro_batches import OwnMicroBatches
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.ownership import take_over
from horovod_partial.torch.round_steps import RoundSteps
from horovod_partial.torch.wrapping import Exchange, Methods, own_attributes, with_positions


def wrap(
    optimizer: torch.optim.Optimizer,
    *,
    compression: Any,
    grad_scaler: torch.amp.GradScaler | None,
    round_steps: RoundSteps,
    **arguments: Any,
) -> torch.optim.Optimizer:
    """Wrap an optimizer with Horovod's DistributedOptimizer. Horovod's own code reduces every gradient.

    These things differ from Horovod: the optimizer's state and other attributes are kept; `zero_grad` takes `set_to_none`;
    bfloat16 gradients are reduced as float32; gradients of a closure are reduced each time when the step evaluates it;
    hooks of the step run once; the result can be pickled (it is unwrapped when it is loaded), and it is freed when
    nothing refers to it. Adasum with clipping or a transform raises ValueError, because it reduces no gradients.
    """
    base, process_set = type(optimizer), arguments["process_set"]
    has_bfloat16 = any(p.dtype == torch.bfloat16 for group in optimizer.param_groups for p in group["params"])
    # A fused optimizer would take a scaler's scale in its step, and each rank would skip a step by its own gradients.
    shared = own_attributes(optimizer) | {"_step_supports_amp_scaling": False}

    # Horovod calls the constructor of the optimizer's class with nothing but the parameter groups. Not every class takes
    # that, and others would make a new state. So Horovod gets a subclass, whose constructor shares all attributes.
    def share(self: Any, _: Any) -> None:
        vars(self).update(shared)
        # Horovod makes a new class for each optimizer that it wraps, so changes of this class affect no other optimizer.
        if vars(type(self)).get("_make_hook") is horovod_optimizer._DistributedOptimizer._make_hook:
            type(self)._make_hook = _make_weak_hook

    wrapped: Any = horovod_optimizer.DistributedOptimizer(
        type(base.__name__, (base,), {"__init__": share})(optimizer.param_groups),
        compression=widening(compression) if has_bfloat16 else compression,
        **arguments,
    )
    cls: Any = type(wrapped)
    exchange = FullExchange(cls, process_set, round_steps, grad_scaler)
    if exchange.is_adasum and round_steps.changes_gradients:
        raise ValueError(
            "op=hvd.Adasum reduces no gradients that could be clipped: leave out max_grad_norm, max_grad_value and grad_transform"
        )

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        if exchange.is_adasum:
            raise ValueError("op=hvd.Adasum needs all parameter groups before the optimizer is wrapped")
        base.add_param_group(self, param_group)
        _reduce_last_group(self)
        take_over(self, process_set)

    # Horovod's methods look for the user's optimizer in the base of the object's class. So this class gets our methods.
    for name, member in vars(Methods).items():
        if name == "__reduce__" or not (name.startswith("__") or name in _KEPT):
            setattr(cls, name, member)
    cls._base, cls.add_param_group = base, add_param_group
    wrapped._exchange = exchange
    exchange._wrapped = weakref.ref(wrapped)
    if grad_scaler is None:
        cls._step_supports_amp_scaling = property(_refuse_scaler_of_local_gradients)
    else:
        # If `_step_supports_amp_scaling` were True, gradients of fused optimizers might be unscaled twice, or never.
        cls._step_supports_amp_scaling = False
        unscale_reduced(grad_scaler, wrapped)
    take_over(wrapped, process_set)
    return wrapped


_KEPT = {"skip_synchronize", "_synchronized"}  # what Horovod's own code has under these names, and reads


class FullExchange(Exchange):
    """Lets Horovod's own code reduce every gradient: the methods that `cls`, the class of Horovod's wrapper, has now."""

    is_flushed = True  # nothing is ever pending

    def __init__(
        self, cls: Any, process_set: ProcessSet, round_steps: RoundSteps, grad_scaler: torch.amp.GradScaler | None
    ) -> None:
        self.process_set = process_set
        self.round_steps = round_steps
        self._horovod = dict(vars(cls))
        # Horovod has two `step` methods. The one for Adasum supports closures, and the other does not.
        self.is_adasum = cls.step is not horovod_optimizer._DistributedOptimizer.step
        self._has_scaler = grad_scaler is not None

    @property
    def rounds(self) -> int:
        return self._local_steps

    @property
    def is_under_way(self) -> bool:
        return bool(getattr(self.wrapped, "_handles", None))

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        synchronizes, changes = optimizer._should_synchronize, self.round_steps.changes_gradients
        if closure is None or self.is_adasum or not synchronizes:
            if changes and synchronizes and not _is_synchronized(optimizer):
                self.synchronize()
            self.round_steps.before(optimizer)
            scaler_has_reduced = self._has_scaler and _is_synchronized(optimizer)
            with optimizer.skip_synchronize() if changes or scaler_has_reduced else nullcontext():
                result = self._horovod["step"](optimizer, closure)
        else:
            if optimizer._handles:  # gradients were made before the closure, for example for SAM's first step
                self.synchronize()
            result = optimizer._base.step(optimizer, lambda: self._reduced(optimizer, closure))
            optimizer._synchronized = False
        self._local_steps += 1
        self.round_steps.after(optimizer)
        return result

    def _reduced(self, optimizer: Any, closure: Callable[[], Any]) -> Any:
        """Evaluate a closure once, and reduce its gradients. Returns this rank's loss; for LBFGS the reduced loss."""
        optimizer._synchronized = False
        loss = closure()
        if not optimizer._synchronized:  # a closure may have called `synchronize` itself, to clip gradients
            self.synchronize()
        self.round_steps.before(optimizer)
        searches = issubclass(type(optimizer), torch.optim.LBFGS)
        if not searches or not self.process_set.included():
            return loss
        # LBFGS decides by the loss how often to evaluate the closure. All ranks must evaluate it equally often.
        name = f"{next(iter(optimizer._parameter_names.values()))}.loss"
        return mpi_ops.allreduce(
            torch.as_tensor(loss).detach(), name=name, op=optimizer.op, process_set=self.process_set
        )

    def synchronize(self) -> None:
        self.work.require_last()
        self._horovod["synchronize"](self.wrapped)

    def before_zero_grad(self) -> None:
        if self.is_under_way:
            self._horovod["zero_grad"](self.wrapped)  # it raises Horovod's error

    def set_passes(self, passes: int) -> None:
        self._horovod["set_backward_passes_per_step"](self.wrapped, passes)

    def flush_optimizer(self, optimizer: Any) -> None:
        pass

    def forget(self) -> None:
        optimizer = self.wrapped
        optimizer._handles, optimizer._synchronized, optimizer._should_synchronize = {}, False, True
        self.set_passes(optimizer.backward_passes_per_step)


def _reduce_last_group(optimizer: Any) -> None:
    """Let gradients of the last parameter group be reduced. Horovod prepares only groups that it finds at first."""
    optimizer._parameter_names = with_positions(optimizer, optimizer._parameter_names)
    reduces = optimizer.process_set.included() and not runtime.is_alone(global_process_set)
    for parameter in optimizer.param_groups[-1]["params"]:
        optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
        if not reduces or not parameter.requires_grad:
            continue
        if optimizer._groups is not None:
            optimizer._p_to_group[parameter] = (parameter,)
            optimizer._group_counts[parameter,] = 0
        optimizer._requires_update.add(parameter)
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        accumulator.register_hook(optimizer._make_hook(parameter))
        optimizer._grad_accs.append(accumulator)


def _is_synchronized(optimizer: Any) -> bool:
    """Return whether gradients are reduced. `_synchronized` may be out of date: skipped steps leave it True."""
    return optimizer._synchronized and not optimizer._exchange.is_under_way


def _make_weak_hook(optimizer: Any, parameter: torch.nn.Parameter) -> Callable[..., None]:
    """Make a gradient hook that refers weakly to the wrapped optimizer.

    Horovod's own hooks keep a wrapper alive. If the parameters got a new wrapper, the old one would still reduce.
    """
    reference = weakref.ref(optimizer)

    def hook(*ignored: Any) -> None:
        wrapped = reference()
        if wrapped is not None and not wrapped.gives_way:
            horovod_optimizer._DistributedOptimizer._make_hook(wrapped, parameter)(*ignored)

    return hook


def _refuse_scaler_of_local_gradients(optimizer: Any) -> bool:
    """Return False as the optimizer's property `_step_supports_amp_scaling`, which `GradScaler.step` reads.

    False means that the GradScaler itself must unscale gradients and skip steps. Raises RuntimeError if gradients are
    still being reduced, or if `step` comes after each pass: the GradScaler would then look at the gradients of this rank
    alone, and each rank would skip steps by itself.
    """
    if optimizer._handles or isinstance(optimizer._exchange.work, OwnMicroBatches):
        raise RuntimeError(
            "a GradScaler steps an optimizer that was wrapped without it, while gradients are under way: each rank would skip "
            "steps by itself. Pass it: hvd.DistributedOptimizer(..., grad_scaler=scaler), or call optimizer.synchronize() first"
        )
    return False


def unscale_reduced(scaler: torch.amp.GradScaler, wrapped: Any) -> None:
    """Let a GradScaler unscale the gradients of a wrapped optimizer when they are reduced, and not before."""
    unscale, step, update = scaler.unscale_, scaler.step, scaler.update

    def synchronize_and_unscale(optimizer: Any) -> None:
        if optimizer is wrapped and not wrapped.ends_update:
            return
        if optimizer is wrapped and not _is_synchronized(wrapped):
            wrapped.synchronize()
        unscale(optimizer)

    # If the optimizer's `step` comes after each backward pass, the scaler acts at the end of an update.
    def step_at_end(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if optimizer is not wrapped:
            return step(optimizer, *args, **kwargs)
        work = wrapped._exchange.work
        if not work.is_last:
            return wrapped.step(*args, **kwargs)
        before, result = work.rounds, step(wrapped, *args, **kwargs)
        if work.rounds == before:  # the scaler has skipped the step, because a gradient is not finite
            work.skipped()
        return result

    def update_at_end(new_scale: float | torch.Tensor | None = None) -> None:
        if not wrapped._exchange.work.keeps_gradients:
            update(new_scale)

    scaler.unscale_ = synchronize_and_unscale  # type: ignore[method-assign]
    scaler.step, scaler.update = step_at_end, update_at_end  # type: ignore[method-assign]


def widening(compression: Any) -> type:
    """Return a compression that widens bfloat16 gradients, and uses the given compression for all others."""

    class Compressor:
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            chosen = Widened if tensor.dtype == torch.bfloat16 else compression
            wire, context = chosen.compress(tensor)
            return wire, (chosen, context)

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            if ctx is None:  # Horovod passes None as the context of sparse gradients
                return tensor
            chosen, context = ctx
            return chosen.decompress(tensor, context)

    return Compressor
