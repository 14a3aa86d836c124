"""What tests need to know of buckets beyond the public interface."""

import torch

from horovod_partial.torch.operations import runtime


def collect(name: str, like: torch.Tensor, process_set: int = 0) -> torch.Tensor:
    """The results that this rank has missed, zeros if there are none. After a flush: what a later operation would get."""
    output = torch.zeros_like(like)
    runtime.core.collect(process_set, name, output.data_ptr())
    return output


def completed(name: str, process_set: int = 0) -> int:
    """How many rounds of a bucket have ended on this rank."""
    return runtime.statistics(process_set).get(name, {"completed": 0})["completed"]
