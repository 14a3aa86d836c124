"""Tells whether this process can reduce tensors on a GPU by partial collectives."""

from __future__ import annotations

import os
from types import ModuleType

from horovod_partial.settings import settings


def gpu_refusal(tensors: str, advice: str, horovod: ModuleType, *, experimental: bool = False) -> str:
    """Return why this process cannot reduce tensors on a GPU; an empty text if it can.

    In the text, `tensors` are words for the refused tensors, and `advice` says what to do instead. `horovod` is
    Horovod's module of the framework, with `cuda_built`. If `experimental`, the framework has not been
    tried on a GPU, and the user must allow its tensors by a setting.
    """
    if experimental and not settings().experimental_gpu:
        return (
            f"partial collectives of {tensors} have not been tried on a GPU yet; {advice}, or set "
            "HOROVOD_PARTIAL_EXPERIMENTAL_GPU=1"
        )
    if not horovod.cuda_built():
        return f"Horovod was built without CUDA, and cannot reduce {tensors}; {advice}"
    if not makes(horovod, "NCCLAllreduce"):
        return (
            "Horovod was built without HOROVOD_GPU_ALLREDUCE=NCCL, and partial collectives reduce tensors on GPUs by NCCL alone; "
            f"rebuild Horovod with HOROVOD_GPU_OPERATIONS=NCCL, and then this package; or {advice}"
        )
    for variable in ("HOROVOD_ENABLE_ASYNC_COMPLETION", "HOROVOD_ENABLE_XLA_OPS"):
        if os.environ.get(variable, "0") not in ("", "0"):
            return f"partial collectives need {variable}=0: they use results on the host's time"
    return ""


def makes(horovod: ModuleType, operation: str) -> bool:
    """Return whether this build of Horovod reduces by `operation`, the name of a class of Horovod's.

    `nccl_built()` does not tell: it is true also if NCCL only broadcasts. But Horovod exports its symbols. A build that
    makes an operation has the type of a shared pointer to it among them.
    """
    symbol = f"_ZTISt15_Sp_counted_ptrIPN7horovod6common{len(operation)}{operation}ELN9__gnu_cxx12_Lock_policyE2EE"
    return hasattr(horovod._basics.MPI_LIB_CTYPES, symbol)
