"""Averages of models: `hvd.average` and `hvd.average_async`, and what optimizers use to pack and average models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from horovod.common.process_sets import ProcessSet, global_process_set

from horovod_partial.exchange.arguments import check_kinds, of_average
from horovod_partial.policies import ModelPolicy, Quorum
from horovod_partial.runtime import bucket_config
from horovod_partial.torch.devices import check_device, device_number
from horovod_partial.torch.operations import (
    PartialHandle,
    check_call,
    empty_like,
    make_config,
    require_tensor,
    runtime,
    submit,
    synchronize,
    wire_dtype,
)


def average(
    tensor: torch.Tensor,
    policy: ModelPolicy | str,
    name: str | None = None,
    *,
    steps: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Average a model with the models of other ranks. The policy says which ranks, and how much each model counts.

    The first call with a name averages over all ranks of `process_set`. After that:

    * `hvd.GroupAverage` averages in the group that this round gives the rank (WAGMA-SGD, IEEE TPDS 2021, section 3.1). The
      first rank that arrives starts the round for all groups. A rank that is too late gets the average of its own model
      and its group's last models at once. In the rounds that it has missed, its last model stands in for it.
    * `hvd.PartialReduce` averages over the first `size` ranks that are ready (P-Reduce, SIGMOD'21). The groups of one
      round are disjoint and run side by side. If fewer than `size` ranks are in training, because others have ended,
      joined or wait in other operations, these few average theirs. With `weights="staleness"` a rank's iteration is the
      number of its calls; after each average it rises to the largest iteration of the group.
    * `hvd.WeightedAverage` waits for every rank, and weighs each model by its rank's `steps` (WP-SGD, equation 6). The
      paper counts the steps of the whole run, so the weight of a slow rank tends to 0. Pass the steps since the last
      average. You decide when to average: the policy's `period` is for optimizers.

    Args:
        tensor: the model, contiguous, of any shape; float16, float32, float64, or bfloat16, which travels as float32. Its
            shape and dtype are the same on every rank. Do not touch it while the operation runs.
        policy: what to average with whom, a policy or its text; the same on every rank. The fields `average` and
            `overlap` are for optimizers.
        name: name of the bucket, the same on every rank and in every round. Required.
        steps: the steps that this rank has taken since the last average, 0 or more. `hvd.WeightedAverage` needs it; no
            other policy takes it.
        process_set: the ranks that take part.

    Returns:
        The average, as a new tensor of the same shape and dtype. It has no gradient.

    Raises:
        ValueError: an argument is wrong, or the name is in use, or is bound to another shape, dtype or policy.
        HorovodInternalError: Horovod has failed or was shut down; or the ranks disagree about the bucket; or Horovod
            reduces with an operation without groups (hierarchical, torus, oneCCL). The message names the operation.
    """
    return synchronize(average_async(tensor, policy, name, steps=steps, process_set=process_set))


def average_async(
    tensor: torch.Tensor,
    policy: ModelPolicy | str,
    name: str | None = None,
    *,
    steps: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> PartialHandle:
    """Same as `hvd.average`, but does not wait for the result.

    Returns:
        A handle for `hvd.synchronize`, `hvd.poll` and `hvd.round_info`. The latter tells the ranks in the average
        (`members`), their steps or iterations (`work`), and whether this rank was late.
    """
    return arrive(tensor, empty_like(tensor), name, of_average(policy, steps), process_set, steps or 0)


def arrive(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    policy: ModelPolicy | Quorum,
    process_set: ProcessSet,
    work: int = 0,
    *,
    members: Sequence[str] = (),
) -> PartialHandle:
    """Arrive with a model at its bucket. The average goes to `output`, which has the model's shape and dtype.

    `Quorum(1.0)` makes a plain average over those ranks of `process_set` that train. `WeightedAverage` weighs this
    rank's model by `work`, a number of steps. (In a flush all weights may be equal. Then `work` is the iteration of the
    model.) Ranks compare `members`, a text for each of the model's tensors. Raises ValueError if the tensor or the name
    is wrong, or before `init`.
    """
    check_kinds({"process_set": process_set})
    require_tensor(tensor)
    runtime.check_initialized()
    check_device(tensor.device)
    name = check_call(tensor, name)
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"an average of models needs floating-point tensors, not {tensor.dtype}")
    config = make_config(
        dtype=wire_dtype(tensor.dtype),
        shape=tuple(tensor.shape),
        device=device_number(tensor.device),
        sync=policy,
        size=runtime.size_of(process_set),
        members=tuple(members),
        **bucket_config.of_models(policy),
    )
    return submit(tensor, output, name, process_set, config, work)


class ModelBucket:
    """Tensors of a model that travel together, so that all of them belong to the same round.

    The tensors are copied into a flat one, because the optimizer may write them while the copy travels. Half precision
    travels as float32, so that the average is exact enough. If one tensor is float64, all travel as float64. Tensors
    without a floating-point type, on an unsupported device or on several devices raise ValueError.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        device = self.tensors[0].device
        for tensor in self.tensors:
            check_device(tensor.device)
            if not tensor.dtype.is_floating_point:
                raise ValueError(f"a model policy averages floating-point tensors, not {tensor.dtype}")
            if tensor.device != device:
                raise ValueError(f"a model policy needs all tensors on one device, not on {device} and {tensor.device}")
        sizes = [tensor.numel() for tensor in self.tensors]
        dtype = torch.float64 if torch.float64 in {tensor.dtype for tensor in self.tensors} else torch.float32
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = torch.split(self.flat, sizes)
        self._views = [part.view(t.shape) for part, t in zip(parts, self.tensors, strict=True)]

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the model's tensors into the flat tensor."""
        torch._foreach_copy_(self._views, self.tensors)

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the flat tensor back into the model's tensors."""
        torch._foreach_copy_(self.tensors, self._views)


def signal(name: str, process_set: ProcessSet) -> None:
    """Tell the other ranks that this rank has called `signal`, by a round of the bucket `name`, without data.

    Only the first round waits for all ranks.
    """
    nothing = torch.zeros(1, device="cpu")  # the bucket is declared on the CPU, whatever PyTorch's default device is
    config = make_config(
        dtype=nothing.dtype, shape=tuple(nothing.shape), size=runtime.size_of(process_set), **bucket_config.of_signals()
    )
    submit(nothing, nothing, name, process_set, config).synchronize()
