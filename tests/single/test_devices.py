"""Which tensors a partial collective takes, by the device that they lie on. What runs on a GPU is not tested here."""

from collections.abc import Iterator

import pytest
import torch

from horovod_partial.exchange import devices
from horovod_partial.exchange.devices import gpu_refusal
from horovod_partial.settings import settings
from horovod_partial.torch.devices import check_device, device_number, mpi_ops, stream_handle

CUDA = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_the_host() -> None:
    check_device(torch.device("cpu"))
    assert device_number(torch.device("cpu")) == -1
    assert device_number(CUDA) == 1


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="tensors on meta are not supported"):
        check_device(torch.device("meta"))


def with_cuda(monkeypatch: pytest.MonkeyPatch, *operations: str) -> None:
    """A Horovod that was built with CUDA, and makes these operations."""
    monkeypatch.setattr(mpi_ops, "cuda_built", lambda: True)
    monkeypatch.setattr(devices, "makes", lambda _, operation: operation in operations)


def test_gpus_are_taken_where_horovod_reduces_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_ops, "cuda_built", lambda: False)
    with pytest.raises(ValueError, match="built without CUDA"):
        check_device(CUDA)
    with_cuda(monkeypatch, "NCCLAllreduce")
    check_device(CUDA)


@pytest.mark.parametrize("operations", [["MPI_GPUAllreduce"], ["NCCLBroadcast"]])
def test_a_horovod_that_reduces_on_gpus_in_another_way_is_refused(
    monkeypatch: pytest.MonkeyPatch, operations: list[str]
) -> None:
    """Over MPI, or on the host because it has NCCL for broadcasts alone."""
    with_cuda(monkeypatch, *operations)
    with pytest.raises(
        ValueError, match=r"without HOROVOD_GPU_ALLREDUCE=NCCL.*rebuild Horovod with HOROVOD_GPU_OPERATIONS=NCCL"
    ):
        check_device(CUDA)


def test_a_build_tells_by_which_operations_it_reduces() -> None:
    """By those that this Horovod has, whatever it was built with."""
    for operation, built in {"GlooAllreduce": "gloo", "MPIAllreduce": "mpi", "NCCLAllreduce": "nccl"}.items():
        assert devices.makes(mpi_ops, operation) == bool(getattr(mpi_ops, f"{built}_built")())
    assert not devices.makes(mpi_ops, "MPI_GPUAllreduce")


def test_what_has_not_run_on_a_gpu_is_refused_until_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, "NCCLAllreduce")
    refusal = gpu_refusal("TensorFlow's tensors", "move them", mpi_ops, experimental=True)
    assert refusal.startswith("partial collectives of TensorFlow's tensors have not been tried on a GPU yet; move them")
    settings.cache_clear()
    monkeypatch.setenv("HOROVOD_PARTIAL_EXPERIMENTAL_GPU", "1")
    assert not gpu_refusal("TensorFlow's tensors", "move them", mpi_ops, experimental=True)


def test_a_graph_would_replay_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert stream_handle(torch.device("cpu")) == 0
    with pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"):
        stream_handle(CUDA)


@pytest.mark.parametrize("variable", ["HOROVOD_ENABLE_ASYNC_COMPLETION", "HOROVOD_ENABLE_XLA_OPS"])
def test_gpus_need_results_on_the_hosts_time(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    with_cuda(monkeypatch, "NCCLAllreduce")
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match=f"{variable}=0"):
        check_device(CUDA)
