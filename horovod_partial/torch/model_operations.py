"""Averages of models: in groups, over the ranks that are ready first, and weighted by the steps of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.mpi_ops import Average, Sum

from horovod_partial import bucket_config
from horovod_partial.checks import require_count
from horovod_partial.exchange.arguments import check_kinds
from horovod_partial.policies import (
    Butterfly,
    GroupAverage,
    ModelPolicy,
    PartialReduce,
    Quorum,
    Schedule,
    WeightedAverage,
)
from horovod_partial.torch.devices import device_number
from horovod_partial.torch.operations import (
    PartialHandle,
    check_arguments,
    empty_like,
    make_config,
    runtime,
    submit,
    synchronize,
    wire_dtype,
)


def group_allreduce_async_(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    schedule: Butterfly | Schedule | None = None,
    period: int | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    max_staleness: int = 8,
    grace_ms: float | str = "auto",
) -> PartialHandle:
    """Average a model with the group that this round gives the rank; in place, and without waiting for slow ranks.

    The first rank that arrives starts the round for all groups, and each group reduces by itself (WAGMA-SGD, IEEE TPDS
    2021, section 3.1). A rank that is too late gets the sum of its group's last round at once. In the rounds that it
    has missed, its last model stands in for it. The first round of a name averages over all ranks together.

    Args:
        tensor: the model, and afterwards the result; contiguous, of the types that `hvd.partial_allreduce` takes.
        name: name of the bucket, the same on every rank and in every round. Required.
        op: `hvd.Average`: sum / n of the n models of the group, or (sum + own) / (n + 1) if this rank was late.
            `hvd.Sum`: the plain sum. It contains this rank's model if `hvd.round_info(handle).late` is False.
        schedule: `hvd.Butterfly(size)` or `hvd.Schedule(function, rounds)`, the same on every rank. None takes a
            butterfly with groups of the largest power of two that is not above the square root of the number of ranks.
        period: number of rounds between two averages over all ranks, for which all ranks wait. None makes no such
            averages.
        process_set: the ranks that take part.
        max_staleness: same as in `hvd.DistributedOptimizer`.
        grace_ms: same as in `hvd.DistributedOptimizer`.

    Returns:
        A handle for `hvd.synchronize`, `hvd.poll` and `hvd.round_info`, which names the members of the group.

    Raises:
        ValueError: an argument is wrong, or the name is in use, or is bound to another shape, dtype or schedule.
        HorovodInternalError: Horovod has failed or was shut down; or the ranks disagree about the bucket; or Horovod reduces
            with an operation without groups (hierarchical, torus, oneCCL). The message names the operation.
    """
    return _group_allreduce(tensor, tensor, name, op, schedule, period, process_set, max_staleness, grace_ms)


def group_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    schedule: Butterfly | Schedule | None = None,
    period: int | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    max_staleness: int = 8,
    grace_ms: float | str = "auto",
) -> PartialHandle:
    """Same as `group_allreduce_async_`, but the result is a new tensor."""
    output = empty_like(tensor)
    return _group_allreduce(tensor, output, name, op, schedule, period, process_set, max_staleness, grace_ms)


def group_allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Same as `group_allreduce_async_`, but waits for the result and returns it."""
    return synchronize(group_allreduce_async_(tensor, *args, **kwargs))


def group_allreduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Same as `group_allreduce_async`, but waits for the result and returns it."""
    return synchronize(group_allreduce_async(tensor, *args, **kwargs))


def partial_reduce_async_(
    tensor: torch.Tensor,
    name: str | None = None,
    size: int = 2,
    weights: str = "constant",
    alpha: float = 0.9,
    process_set: ProcessSet = global_process_set,
) -> PartialHandle:
    """Average a model with the first ranks that are ready; in place (P-Reduce, SIGMOD'21).

    As soon as `size` ranks have arrived, they average among themselves and go on, without the others. The groups of one
    round are disjoint and run side by side. A group that becomes ready while a round runs is in the next round. The
    first round of a name averages over all ranks together. If fewer than `size` ranks are left, because others have
    ended, joined or wait in other operations, those left average.

    Args:
        tensor: the model: contiguous, float16, float32, float64 or bfloat16, which travels as float32.
        name: name of the bucket, the same on every rank and in every call.
        size: ranks in a group, 2 or more. If it is larger than the number of ranks, all ranks are one group.
        weights: same as in `hvd.PartialReduce`. The iteration of a rank is how often it has called this with `name`;
            after each average it rises to the largest iteration of the group.
        alpha: same as in `hvd.PartialReduce`.
        process_set: the ranks that take part.

    Returns:
        A handle for `hvd.synchronize`, `hvd.poll` and `hvd.round_info`, which names the members of the group.

    The errors are those of `hvd.group_allreduce_async_`.
    """
    policy = PartialReduce(size, weights, alpha)
    return average_async(tensor, tensor, name, policy, process_set)


def partial_reduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    size: int = 2,
    weights: str = "constant",
    alpha: float = 0.9,
    process_set: ProcessSet = global_process_set,
) -> PartialHandle:
    """Same as `partial_reduce_async_`, but the result is a new tensor."""
    policy = PartialReduce(size, weights, alpha)
    return average_async(tensor, empty_like(tensor), name, policy, process_set)


def partial_reduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Same as `partial_reduce_async_`, but waits for the result and returns it."""
    return synchronize(partial_reduce_async_(tensor, *args, **kwargs))


def partial_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Same as `partial_reduce_async`, but waits for the result and returns it."""
    return synchronize(partial_reduce_async(tensor, *args, **kwargs))


def weighted_average_async_(
    tensor: torch.Tensor,
    steps: int,
    contraction: float,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> PartialHandle:
    """Average a model over all ranks, weighted by the steps of each rank; in place (WP-SGD, equation 6).

    The average waits for every rank. A rank that has taken T steps fewer than the fastest gets the weight
    contraction^T, before all weights are divided by their sum. (The paper counts T over the whole run, so the weight of
    a slow rank tends to 0. Here pass the steps since the last average.)

    Args:
        tensor: the model: contiguous, float16, float32, float64 or bfloat16, which travels as float32.
        steps: how many steps this rank has taken since the last average, 0 or more.
        contraction: the factor per missing step, above 0 and at most 1; the same on every rank.
        name: name of the bucket, the same on every rank and in every call.
        process_set: the ranks that take part.

    Returns:
        A handle for `hvd.synchronize`, `hvd.poll` and `hvd.round_info`. The `work` of the latter has the steps of all
        ranks.

    The errors are those of `hvd.group_allreduce_async_`.
    """
    return average_async(tensor, tensor, name, WeightedAverage(1, contraction), process_set, steps)


def weighted_average_async(
    tensor: torch.Tensor,
    steps: int,
    contraction: float,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> PartialHandle:
    """Same as `weighted_average_async_`, but the result is a new tensor."""
    return average_async(tensor, empty_like(tensor), name, WeightedAverage(1, contraction), process_set, steps)


def weighted_average_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Same as `weighted_average_async_`, but waits for the result and returns it."""
    return synchronize(weighted_average_async_(tensor, *args, **kwargs))


def weighted_average(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Same as `weighted_average_async`, but waits for the result and returns it."""
    return synchronize(weighted_average_async(tensor, *args, **kwargs))


def _group_allreduce(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int,
    schedule: Butterfly | Schedule | None,
    period: int | None,
    process_set: ProcessSet,
    max_staleness: int,
    grace_ms: float | str,
) -> PartialHandle:
    check_kinds({"op": op})
    if op not in (Average, Sum):
        raise ValueError("groups reduce with op=hvd.Average or hvd.Sum, not with Adasum, Min, Max or Product")
    name = check_arguments(tensor, name, process_set)
    policy = GroupAverage(schedule=schedule, period=period, max_staleness=max_staleness, grace_ms=grace_ms)
    config = _config(tensor, policy, process_set, op)
    return submit(tensor, output, name, process_set, config)


def average_async(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    policy: ModelPolicy | Quorum,
    process_set: ProcessSet,
    steps: int = 0,
    members: Sequence[str] = (),
) -> PartialHandle:
    """Hand a model over to the bucket of a policy."""
    name = check_arguments(tensor, name, process_set)
    require_count("steps", steps, 0)
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"an average of models needs floating-point tensors, not {tensor.dtype}")
    config = _config(tensor, policy, process_set, Average, tuple(members))
    return submit(tensor, output, name, process_set, config, steps)


def average_over_all_(model: torch.Tensor, name: str, process_set: ProcessSet) -> PartialHandle:
    """Average a model in place over all ranks that are not out of training."""
    handle = submit(model, model, name, process_set, _config(model, Quorum(1.0), process_set, Average))
    handle.synchronize()
    return handle


def signal(name: str, process_set: ProcessSet) -> None:
    """Tell the other ranks that some rank has come here, by a round. Only the first round waits, for all ranks."""
    nothing = torch.zeros(1, device="cpu")  # the declaration says CPU, whatever the default device is
    config = make_config(
        dtype=nothing.dtype, shape=tuple(nothing.shape), size=runtime.size_of(process_set), **bucket_config.of_signals()
    )
    submit(nothing, nothing, name, process_set, config).synchronize()


def _config(
    tensor: torch.Tensor,
    policy: ModelPolicy | Quorum,
    process_set: ProcessSet,
    op: int,
    members: tuple[str, ...] = (),
) -> Any:
    return make_config(
        dtype=wire_dtype(tensor.dtype),
        shape=tuple(tensor.shape),
        device=device_number(tensor.device),
        sync=policy,
        size=runtime.size_of(process_set),
        op=op,
        members=members,
        **bucket_config.of_models(policy),
    )
