"""In place of horovod_partial/exchange/devices.py: the double of a GPU is not refused, though Horovod has no CUDA."""

from typing import Any


def gpu_refusal(*_: Any, **__: Any) -> str:
    """Empty: tensors on GPUs are taken."""
    return ""
