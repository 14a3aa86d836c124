"""Programs for Horovod, unedited, with ours in its place: `horovod-partial run`."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.whole_jobs import Job

from horovod_partial.insight import recording

RUN = ("-m", "horovod_partial", "run", "--sync", "majority")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the ranks record."""
    return tmp_path / "recordings"


def run(job: Job, folder: Path, program: str, *arguments: str) -> int:
    """Start a program, as users do, and wait for its end."""
    job.start(program, *arguments, runner=RUN, HOROVOD_PARTIAL_RECORD=str(folder))
    return job.wait()


def has_rounds(folder: Path) -> bool:
    """Rank 0 has decided on rounds of ours."""
    return len(recording.load(folder).ranks[0].tables["rounds"]["round"]) > 0


@pytest.mark.parametrize("what", ["ends", pytest.param("exits", marks=pytest.mark.full_matrix)])
def test_torch(job: Job, folder: Path, what: str) -> None:
    assert run(job, folder, "stock_torch", what) == 0, job.output()
    modules = "horovod_partial.torch.optimizer horovod_partial.torch.operations horovod.torch.mpi_ops"
    assert job.notes("trained") == dict.fromkeys(range(job.setup.ranks), modules)
    assert has_rounds(folder)
    assert job.output().count("of horovod.torch these are ours: DistributedOptimizer, add_process_set,") == 1


@pytest.mark.full_matrix
def test_a_failure_is_told(job: Job, folder: Path) -> None:
    assert run(job, folder, "stock_torch", "fails") != 0
    assert f"rank {job.setup.ranks - 1} has failed: RuntimeError: planned failure" in job.output()


@pytest.mark.launch(transports=("gloo",), ranks=(2,))
@pytest.mark.full_matrix
def test_an_elastic_job(job: Job) -> None:
    ended = job.run_elastic("stock_elastic", runner=RUN)
    assert ended == dict.fromkeys(range(3), "3 horovod_partial.torch.operations"), job.output()


@pytest.mark.launch(framework="tensorflow")
@pytest.mark.full_matrix("mpi")
def test_tensorflow(job: Job, folder: Path) -> None:
    assert run(job, folder, "stock_tensorflow") == 0, job.output()
    modules = "horovod_partial.tensorflow.tape horovod_partial.tensorflow.operations horovod.tensorflow"
    assert job.notes("trained") == dict.fromkeys(range(job.setup.ranks), modules)
    assert has_rounds(folder)


@pytest.mark.launch(framework="tensorflow")
@pytest.mark.parametrize(
    "module", ["horovod.tensorflow.keras", pytest.param("horovod.keras", marks=pytest.mark.full_matrix)]
)
@pytest.mark.full_matrix("gloo")
def test_keras(job: Job, folder: Path, module: str) -> None:
    assert run(job, folder, "stock_keras", module) == 0, job.output()
    modules = "horovod_partial.keras.optimizer horovod_partial.tensorflow.operations horovod_partial.keras.callbacks"
    assert job.notes("trained") == dict.fromkeys(range(job.setup.ranks), modules)
    assert has_rounds(folder)


@pytest.mark.full_matrix("mpi")
def test_without_ours_they_are_horovods(job: Job) -> None:
    assert job.run("stock_torch", "ends") == 0, job.output()
    modules = "horovod.torch.optimizer horovod.torch.mpi_ops horovod.torch.mpi_ops"
    assert job.notes("trained") == dict.fromkeys(range(job.setup.ranks), modules)
