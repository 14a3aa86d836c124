"""The device that a tensor lies on: whether it is taken, Horovod's number for it, and the stream that makes the tensor."""

from __future__ import annotations

import torch
from horovod.torch import mpi_ops

from horovod_partial.exchange.devices import gpu_refusal


def check_device(device: torch.device) -> None:
    """Refuse tensors whose memory the core cannot work on.

    Raises:
        ValueError: the tensor is neither on the host nor on a CUDA device, or Horovod or its settings do not allow the latter.
    """
    if device.type == "cpu":
        return
    advice = "use sync=hvd.Full(), or move them to the CPU"
    if device.type != "cuda":
        raise ValueError(f"partial collectives of tensors on {device} are not supported; {advice}")
    if refusal := gpu_refusal(f"tensors on {device}", advice, mpi_ops):
        raise ValueError(refusal)


def device_number(device: torch.device) -> int:
    """Horovod's number for a device: -1 is the host."""
    return -1 if device.type == "cpu" else device.index


def stream_handle(device: torch.device) -> int:
    """CUDA's handle of the stream on which PyTorch queues now, 0 on the host.

    Raises:
        RuntimeError: what is queued there is being captured into a graph.
    """
    if device.type == "cpu":
        return 0
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "partial collectives cannot be captured into a CUDA graph, which would replay one round for ever; capture the "
            "forward and backward passes alone, and leave the optimizer's step and its reductions outside"
        )
    return int(torch.cuda.current_stream(device).cuda_stream)
