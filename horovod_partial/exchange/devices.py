"""Whether partial collectives take tensors that lie on a GPU."""

from __future__ import annotations

import os
from types import ModuleType

from horovod_partial.settings import settings


def gpu_refusal(tensors: str, advice: str, horovod: ModuleType) -> str:
    """Why they do not; empty where they do.

    Args:
        tensors: what is refused, in words.
        advice: what to do instead.
        horovod: Horovod's module of the framework that knows what was built.
    """
    if not settings().experimental_gpu:
        return (
            f"partial collectives of {tensors} have not been tried on a GPU yet; {advice}, or set "
            "HOROVOD_PARTIAL_EXPERIMENTAL_GPU=1"
        )
    if not (horovod.cuda_built() and horovod.nccl_built()):
        return f"Horovod was built without CUDA and NCCL, and cannot reduce {tensors}; {advice}"
    for variable in ("HOROVOD_ENABLE_ASYNC_COMPLETION", "HOROVOD_ENABLE_XLA_OPS"):
        if os.environ.get(variable, "0") not in ("", "0"):
            return f"partial collectives need {variable}=0: they use results on the host's time"
    return ""
