"""`hvd.DistributedOptimizer` of PyTorch, with a sync policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average

from horovod_partial import policies
from horovod_partial.checks import is_flag, require
from horovod_partial.exchange.arguments import (
    check_compression,
    check_kinds,
    refuse_about_gradients,
    warn_of_policy,
    with_num_groups,
)
from horovod_partial.exchange.bucket_options import BucketOptions
from horovod_partial.merging import MergedGradients
from horovod_partial.policies import Full, ModelPolicy, Policy, Quorum, SharedUpdates, WorkSharing
from horovod_partial.settings import settings
from horovod_partial.torch import amp, full_optimizer
from horovod_partial.torch.bucket_set import BucketSet
from horovod_partial.torch.late_gradients import LateGradients
from horovod_partial.torch.micro_batches import OwnMicroBatches, counting_passes
from horovod_partial.torch.model_exchange import ModelExchange
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.round_applier import RoundApplier
from horovod_partial.torch.round_steps import GradTransform, RoundSteps
from horovod_partial.torch.shared_gradients import SharedGradients
from horovod_partial.torch.wrapping import check_names, with_positions, wrap


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    sync: Policy | str | None = None,
    merging: MergedGradients | None = None,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    grad_transform: GradTransform | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
    step_each_pass: bool = False,
) -> torch.optim.Optimizer:
    """Wrap an optimizer so that gradients are combined over the ranks before its step, or models are averaged after it.

    The arguments before `sync`, the methods `synchronize`, `skip_synchronize`, `set_backward_passes_per_step` and the
    errors are the same as in `horovod.torch.DistributedOptimizer`. With a partial policy gradients are packed into
    buckets. A bucket arrives at its open round as soon as backward has made its gradients (docs/protocol.md).

    With a model policy (`hvd.GroupAverage`, `hvd.PartialReduce`, `hvd.WeightedAverage`) each rank steps with its own
    gradients, then averages its model with others. Arguments about gradients do not apply. Let all ranks start from the
    same model (`hvd.broadcast_parameters`), and call `flush` on all ranks before an evaluation or a checkpoint. Use the
    learning rate of one rank, not multiplied by the number of ranks.

    Args:
        optimizer: any optimizer of PyTorch whose step needs no repeated closure. The wrapper shares its state and
            parameter groups.
        named_parameters, backward_passes_per_step, gradient_predivide_factor, process_set: same as in Horovod.
        compression: same as in Horovod. Late contributions and missed results are kept compressed.
        op: same as in Horovod; a partial policy takes only `hvd.Average` and `hvd.Sum`.
        num_groups: same as in Horovod (deprecated there).
        groups: same as in Horovod. Under a partial policy each group is a bucket; other gradients are packed by size.
        sparse_as_dense: same as in Horovod; a partial policy needs it if gradients are sparse.
        sync: `hvd.Full()`, `hvd.Solo()`, `hvd.Majority()`, `hvd.Quorum(...)`, a model policy, or the
            policy's name; None takes `HOROVOD_PARTIAL_SYNC`, and without it `Full()`, which is Horovod's own optimizer.
        merging: `hvd.MergedGradients()` packs gradients by a measured plan (see `optimizer.merging_plan`). None leaves
            packing to Horovod under `Full()`, and packs by size (`HOROVOD_PARTIAL_BUCKET_MB`) under a partial policy.
        max_grad_norm: clip the gradients of each round together to this norm, by `torch.nn.utils.clip_grad_norm_`.
        max_grad_value: clip each element of these gradients to this value, by `torch.nn.utils.clip_grad_value_`.
        grad_transform: a function that changes the list of each round's gradients in place, before they are clipped.
        grad_scaler: the GradScaler of the training, if it uses one. Under a partial policy contributions travel
            unscaled, because the scale may change before a late one is applied. If the result of a round is not finite,
            every rank skips the round; the scale changes once for each round. The `step` of a GradScaler that was not
            passed raises RuntimeError.
        named_buffers: `model.named_buffers()`, for a model policy that averages buffers.
        step_each_pass: whether the loop calls `step` after each backward pass, as under `hvd.WorkSharing()`, where this
            has no effect. Then every `backward_passes_per_step`-th call takes the step, the others return at once, and
            `zero_grad` does nothing within an update. So one loop serves every policy. False is Horovod's loop.

    Returns:
        An instance of the optimizer's class with the methods above and `flush()`, `flushed()`, `rounds`,
        `register_round_hook()`. It shares the optimizer's state, and pickles as an instance of the original class. Use
        `hvd.follow_rounds` to let a learning rate schedule follow rounds.

    Raises:
        ValueError: an argument is wrong, or does not suit the policy.
    """
    policy = policies.resolve(sync, settings().sync, shares_work=True)
    fits = isinstance(getattr(optimizer, "param_groups", None), list)
    require(fits, "optimizer", "an optimizer of PyTorch", optimizer)
    missing = [name for name in ("state", "defaults") if not hasattr(optimizer, name)]
    if missing:
        raise ValueError(
            f"optimizer, a {type(optimizer).__name__}, has no {' and no '.join(missing)}: let its constructor call that of "
            "torch.optim.Optimizer"
        )
    if getattr(optimizer, "is_horovod_partial", False) or type(optimizer).__module__ == "horovod.torch.optimizer":
        raise ValueError("optimizer is a DistributedOptimizer already; wrap the optimizer itself, and wrap it once")
    groups = with_num_groups(groups, num_groups)
    warn_of_policy(runtime, policy, optimizer, backward_passes_per_step)
    horovods: dict[str, Any] = {
        "named_parameters": named_parameters,
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    arguments = {**horovods, "merging": merging, "named_buffers": named_buffers}
    check_kinds(arguments)
    check_compression(compression)
    fits = grad_scaler is None or isinstance(grad_scaler, torch.amp.GradScaler)
    require(fits, "grad_scaler", "a torch.amp.GradScaler", grad_scaler)
    require(is_flag(step_each_pass), "step_each_pass", "True or False", step_each_pass)
    counted = counting_passes if step_each_pass else lambda optimizer: optimizer
    round_steps = RoundSteps(max_grad_norm, max_grad_value, grad_transform)
    if isinstance(policy, ModelPolicy):
        refuse_about_gradients(policy, arguments, Compression.none)
        if "buffers" in policy.average and named_buffers is None:
            raise ValueError('average="buffers" needs named_buffers=model.named_buffers()')
        names = check_names(optimizer, named_parameters)
        buffers = list(named_buffers or ())
        averaged = wrap(
            optimizer,
            lambda optimizer: ModelExchange(
                optimizer,
                names=with_positions(optimizer, names),
                named_buffers=buffers,
                process_set=process_set,
                policy=policy,
                round_steps=round_steps,
            ),
            backward_passes_per_step,
            **({"_step_supports_amp_scaling": property(_supports_scaler)} if grad_scaler is None else {}),
        )
        if grad_scaler is not None:
            full_optimizer.unscale_reduced(grad_scaler, averaged)
        return counted(averaged)
    require(merging is None or isinstance(merging, MergedGradients), "merging", "hvd.MergedGradients(...)", merging)
    if merging is not None and groups is not None:
        raise ValueError("give merging or groups, not both: each says which gradients travel together")
    if isinstance(policy, Full) and merging is None:
        return counted(full_optimizer.wrap(optimizer, grad_scaler=grad_scaler, round_steps=round_steps, **horovods))
    names = check_names(optimizer, named_parameters)
    shares = isinstance(policy, WorkSharing)
    if shares and merging is not None:
        raise ValueError("merging cannot be used with hvd.WorkSharing()")

    scales = grad_scaler is not None and grad_scaler.is_enabled()
    agreed = {"grad_scaler": "a scaler" if scales else None} | round_steps.agreed
    agreed["merging"] = None if merging is None else merging.agreed

    def make_exchange(optimizer: torch.optim.Optimizer) -> RoundApplier:
        sync: Any = SharedUpdates(backward_passes_per_step) if shares else policy
        options = BucketOptions(
            runtime,
            # Merged gradients travel in rounds, even under Full(), where each round waits for every rank.
            Quorum(1.0) if isinstance(policy, Full) else sync,
            horovods,
            replays=True,
            unscaled=scales and process_set.included() and not runtime.is_alone(process_set),
            agreed=[f"{name}={value}" for name, value in agreed.items() if value is not None],
        )
        buckets = BucketSet(optimizer, with_positions(optimizer, names), options, merging)
        return (SharedGradients if shares else LateGradients)(
            buckets, round_steps, grad_scaler, backward_passes_per_step
        )

    # If `_step_supports_amp_scaling` were True, a fused optimizer would unscale gradients before their reduction.
    takes_scaler: Any = property(_refuse_unknown_scaler) if grad_scaler is None else False
    wrapped = wrap(optimizer, make_exchange, backward_passes_per_step, _step_supports_amp_scaling=takes_scaler)
    if grad_scaler is not None and wrapped._exchange.unscales:
        amp.follow_rounds(grad_scaler, wrapped)
    elif grad_scaler is not None:
        full_optimizer.unscale_reduced(grad_scaler, wrapped)
    return counted(wrapped)


def _supports_scaler(optimizer: Any) -> bool:
    """Return what the user's optimizer says. Raises RuntimeError if `step` comes after each backward pass.

    `GradScaler.step` reads this property. Without the wrapper's help it would unscale accumulated gradients several times.
    """
    if isinstance(optimizer._exchange.work, OwnMicroBatches):
        _refuse_unknown_scaler(optimizer)
    found: bool = vars(optimizer).get("_step_supports_amp_scaling", False)
    return found


def _refuse_unknown_scaler(_: torch.optim.Optimizer) -> bool:
    """Raise RuntimeError when `GradScaler.step` reads this property: the optimizer was wrapped without a scaler."""
    raise RuntimeError(
        "a GradScaler steps an optimizer that was wrapped without it: late gradients would be applied with their scale. "
        "Pass it: hvd.DistributedOptimizer(..., grad_scaler=scaler)"
    )
