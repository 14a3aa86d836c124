"""The device that PyTorch's tensors lie on, which works behind the host's back."""

from __future__ import annotations

import torch


def finish() -> None:
    """Wait until the device has done what this rank has asked for. A CPU has."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
