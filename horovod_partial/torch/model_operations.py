"""Averages of models: of groups, of the ranks that are ready first, and by the work behind each."""

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
    max_staleness: int | None = None,
    grace_ms: float | str | None = None,
) -> PartialHandle:
    """Average a model with the group that this round gives the rank; in place, and without waiting for slow ranks.

    The first rank that arrives starts the round for all groups, each of which reduces by itself (WAGMA-SGD, IEEE TPDS
    2021, section 3.1). A rank that is too late gets the sum of its group's last round at once; in the rounds that close
    without it its last model stands in for it. The first round of a name is of all ranks together.

    Args:
        tensor: the model: contiguous, of the types that `hvd.partial_allreduce` takes. Holds the result afterwards.
        name: names the bucket; the same on every rank and in every round. Required: rounds follow the name.
        op: `hvd.Average`: sum / n of the n models of the group, or (sum + own) / (n + 1) where this rank was late.
            `hvd.Sum`: the sum as it is, own model included if `hvd.round_info(handle).late` is False.
        schedule: `hvd.Butterfly(size)` or `hvd.Schedule(function, rounds)`, the same on every rank; None
            takes a butterfly of the largest power of two that is not above the square root of the number of ranks.
        period: every so many rounds one is of all ranks together, and all wait for it; None never.
        process_set: the ranks that take part.
        max_staleness: as in `hvd.DistributedOptimizer`.
        grace_ms: as in `hvd.DistributedOptimizer`.

    Returns:
        A handle for `hvd.synchronize`, `hvd.poll` and `hvd.round_info`, which names the members of the group.

    Raises:
        ValueError: an argument is wrong, or the name is bound to another shape, dtype or schedule, or in use.
        HorovodInternalError: Horovod has failed or was shut down; or the ranks disagree about the bucket; or Horovod reduces
            with an operation that knows no groups (hierarchical, torus, oneCCL), which the text names.
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
    max_staleness: int | None = None,
    grace_ms: float | str | None = None,
) -> PartialHandle:
    """As `group_allreduce_async_`, with the result in a new tensor."""
    output = empty_like(tensor)
    return _group_allreduce(tensor, output, name, op, schedule, period, process_set, max_staleness, grace_ms)


def group_allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `group_allreduce_async_`, and waits for the result."""
    return synchronize(group_allreduce_async_(tensor, *args, **kwargs))


def group_allreduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `group_allreduce_async`, and waits for the result."""
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

    As soon as `size` ranks have arrived they average among themselves, and go on; the others are not disturbed. The
    groups of one round are disjoint and run side by side; a group that is ready while a round runs is in the next. The
    first round of a name is of all ranks together. If fewer than `size` ranks are left, because others have ended, joined
    or wait elsewhere, those average.

    Args:
        tensor: the model: contiguous, float16, float32, float64 or bfloat16, which travels as float32.
        name: names the bucket; the same on every rank and every time.
        size: ranks in a group, 2 or more. More ranks than there are means all of them.
        weights: as in `hvd.PartialReduce`; the iteration of a rank is how often it has called this with `name`, taken to
            the group's newest after each average.
        alpha: as in `hvd.PartialReduce`.
        process_set: the ranks that take part.

    Returns:
        A handle for `hvd.synchronize`, `hvd.poll` and `hvd.round_info`, which names the members of the group.

    It raises what `hvd.group_allreduce_async_` raises.
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
    """As `partial_reduce_async_`, with the result in a new tensor."""
    policy = PartialReduce(size, weights, alpha)
    return average_async(tensor, empty_like(tensor), name, policy, process_set)


def partial_reduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `partial_reduce_async_`, and waits for the result."""
    return synchronize(partial_reduce_async_(tensor, *args, **kwargs))


def partial_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `partial_reduce_async`, and waits for the result."""
    return synchronize(partial_reduce_async(tensor, *args, **kwargs))


def weighted_average_async_(
    tensor: torch.Tensor,
    steps: int,
    contraction: float,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> PartialHandle:
    """Average a model over all ranks, weighted by the steps behind it; in place (WP-SGD, equation 6).

    Waits for every rank. A rank that has taken T steps fewer than the fastest counts with contraction^T. (The paper counts
    T over the whole run, where a slow rank's weight vanishes in time; pass the steps since the last average.)

    Args:
        tensor: the model: contiguous, float16, float32, float64 or bfloat16, which travels as float32.
        steps: that this rank has taken since the last average, 0 or more.
        contraction: above 0 and at most 1, the same on every rank.
        name: names the bucket; the same on every rank and every time.
        process_set: the ranks that take part.

    Returns:
        A handle for `hvd.synchronize`, `hvd.poll` and `hvd.round_info`, whose `work` has the steps of all ranks.

    It raises what `hvd.group_allreduce_async_` raises.
    """
    return average_async(tensor, tensor, name, WeightedAverage(1, contraction), process_set, steps)


def weighted_average_async(
    tensor: torch.Tensor,
    steps: int,
    contraction: float,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> PartialHandle:
    """As `weighted_average_async_`, with the result in a new tensor."""
    return average_async(tensor, empty_like(tensor), name, WeightedAverage(1, contraction), process_set, steps)


def weighted_average_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `weighted_average_async_`, and waits for the result."""
    return synchronize(weighted_average_async_(tensor, *args, **kwargs))


def weighted_average(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `weighted_average_async`, and waits for the result."""
    return synchronize(weighted_average_async(tensor, *args, **kwargs))


def _group_allreduce(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int,
    schedule: Butterfly | Schedule | None,
    period: int | None,
    process_set: ProcessSet,
    max_staleness: int | None,
    grace_ms: float | str | None,
) -> PartialHandle:
    check_kinds({"op": op})
    bucket_config.check_rounds(max_staleness, grace_ms)
    if op not in (Average, Sum):
        raise ValueError("groups reduce with op=hvd.Average or hvd.Sum, not with Adasum, Min, Max or Product")
    name = check_arguments(tensor, name, process_set)
    policy = GroupAverage(schedule=schedule, period=period)
    config = _config(tensor, policy, process_set, op, max_staleness, grace_ms)
    return submit(tensor, output, name, process_set, config)


def average_async(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    policy: ModelPolicy | Quorum,
    process_set: ProcessSet,
    steps: int = 0,
    max_staleness: int | None = None,
    grace_ms: float | str | None = None,
    members: Sequence[str] = (),
) -> PartialHandle:
    """Arrive with a model at a policy's bucket."""
    name = check_arguments(tensor, name, process_set)
    require_count("steps", steps, 0)
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"an average of models needs floating-point tensors, not {tensor.dtype}")
    config = _config(tensor, policy, process_set, Average, max_staleness, grace_ms, tuple(members))
    return submit(tensor, output, name, process_set, config, steps)


def average_over_all_(model: torch.Tensor, name: str, process_set: ProcessSet) -> PartialHandle:
    """Average a model over all ranks in place; ranks out of training are left out, and do not count."""
    handle = submit(model, model, name, process_set, _config(model, Quorum(1.0), process_set, Average, None, None))
    handle.synchronize()
    return handle


def signal(name: str, process_set: ProcessSet) -> None:
    """Tell in a round that some rank has come here; waits for nobody, but for all in the first round."""
    nothing = torch.zeros(1, device="cpu")  # as the declaration says, whatever the default device is
    config = make_config(
        dtype=nothing.dtype, shape=tuple(nothing.shape), size=runtime.size_of(process_set), **bucket_config.of_signals()
    )
    submit(nothing, nothing, name, process_set, config).synchronize()


def _config(
    tensor: torch.Tensor,
    policy: ModelPolicy | Quorum,
    process_set: ProcessSet,
    op: int,
    max_staleness: int | None,
    grace_ms: float | str | None,
    members: tuple[str, ...] = (),
) -> Any:
    return make_config(
        dtype=wire_dtype(tensor.dtype),
        shape=tuple(tensor.shape),
        device=device_number(tensor.device),
        sync=policy,
        size=runtime.size_of(process_set),
        op=op,
        max_staleness=max_staleness,
        grace_ms=grace_ms,
        members=members,
        **bucket_config.of_models(policy),
    )
