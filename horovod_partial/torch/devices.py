"""What the core must know of a tensor's device: whether it is supported, Horovod's number for it, and its streams."""

from __future__ import annotations

import torch
from horovod.torch import mpi_ops

from horovod_partial.exchange.devices import gpu_refusal


def check_device(device: torch.device) -> None:
    """Raise ValueError unless a device is the CPU, or a CUDA device that Horovod and the settings allow."""
    if device.type == "cpu":
        return
    advice = "use sync=hvd.Full(), or move them to the CPU"
    if device.type != "cuda":
        raise ValueError(f"partial collectives of tensors on {device} are not supported; {advice}")
    if refusal := gpu_refusal(f"tensors on {device}", advice, mpi_ops):
        raise ValueError(refusal)


def device_number(device: torch.device) -> int:
    """Return Horovod's number for a device; -1 for the CPU."""
    return -1 if device.type == "cpu" else device.index


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError while PyTorch captures a CUDA graph on this device."""
    if device.type != "cpu" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "partial collectives cannot be captured into a CUDA graph, which would replay one round for ever; capture the "
            "forward and backward passes alone, and leave the optimizer's step and its reductions outside"
        )


def stream_handle(device: torch.device) -> int:
    """Return CUDA's handle of PyTorch's current stream; 0 for the CPU. Raises RuntimeError during a graph capture."""
    refuse_capture(device)
    return 0 if device.type == "cpu" else int(torch.cuda.current_stream(device).cuda_stream)


def keep_for_stream(tensor: torch.Tensor) -> None:
    """Let PyTorch not use the memory of a CUDA tensor again before the current stream is done with what it has queued."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
