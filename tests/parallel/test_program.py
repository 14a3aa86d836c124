"""Programs for Horovod, unedited, with ours in its place: `horovod-partial run`."""

import ast
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.matrix import long_cases
from harness.whole_jobs import PROGRAMS, Job

from horovod_partial.insight import recording

sys.path.append(str(PROGRAMS))
from stock_data import weights_of_one_process

RUN = ("-m", "horovod_partial", "run", "--sync", "majority")
RUN_FULL = ("-m", "horovod_partial", "run", "--sync", "full")


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
    return len(recording.load(folder).ranks[0].tables["rounds"]["time"]) > 0


@pytest.mark.parametrize("what", ["ends", pytest.param("exits", marks=pytest.mark.full_matrix)])
@pytest.mark.full_matrix("gloo")
def test_torch(job: Job, folder: Path, what: str) -> None:
    assert run(job, folder, "stock_torch", what) == 0, job.output()
    modules = "horovod_partial.torch.optimizer horovod_partial.runtime.runtime horovod.torch.mpi_ops"
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
    assert ended == dict.fromkeys(range(3), "3 horovod_partial.runtime.runtime"), job.output()


@pytest.mark.launch(framework="tensorflow")
@pytest.mark.full_matrix
def test_tensorflow(job: Job, folder: Path) -> None:
    assert run(job, folder, "stock_tensorflow") == 0, job.output()
    modules = "horovod_partial.tensorflow.tape horovod_partial.tensorflow.operations horovod.tensorflow"
    assert job.notes("trained") == dict.fromkeys(range(job.setup.ranks), modules)
    assert has_rounds(folder)


@pytest.mark.launch(framework="tensorflow")
@pytest.mark.parametrize("module", ["horovod.tensorflow.keras", "horovod.keras"])
@pytest.mark.full_matrix
def test_keras(job: Job, folder: Path, module: str) -> None:
    assert run(job, folder, "stock_keras", module) == 0, job.output()
    modules = "horovod_partial.keras.optimizer horovod_partial.tensorflow.operations horovod_partial.keras.callbacks"
    assert job.notes("trained") == dict.fromkeys(range(job.setup.ranks), modules)
    assert has_rounds(folder)


@pytest.mark.launch(framework="tensorflow", ranks=(2,))
@pytest.mark.full_matrix("gloo")
def test_legacy_keras_is_left_to_horovod(job: Job) -> None:
    """Under `Full` nothing of the optimizer is ours."""
    assert job.run("stock_legacy_keras", runner=RUN_FULL) == 0, job.output()
    modules = (
        "horovod._keras horovod.tensorflow.keras horovod.tensorflow.keras.callbacks horovod_partial.runtime.runtime"
    )
    assert job.notes("made") == dict.fromkeys(range(job.setup.ranks), modules)


@pytest.mark.launch(framework="tensorflow", ranks=(2,))
@pytest.mark.full_matrix
def test_legacy_keras_under_a_partial_policy(job: Job) -> None:
    assert job.run("stock_legacy_keras", runner=RUN) == 0, job.output()
    assert " horovod_partial.keras.optimizer horovod_partial.keras.callbacks " in job.notes("made")[0]


TAPE, FIT = ("stock_tensorflow",), ("stock_keras", "horovod.tensorflow.keras")


@pytest.mark.launch(framework="tensorflow", ranks=(2,))
@pytest.mark.parametrize("program", [FIT, *long_cases(TAPE, (*FIT, "no-callbacks"))], ids=" ".join)
@pytest.mark.full_matrix("gloo")
def test_programs_that_stock_horovod_cannot_run_on_keras_3(job: Job, program: tuple[str, ...]) -> None:
    if "no-callbacks" in program:
        assert job.run(*program) == 0, job.output()
        assert len(set(job.notes("weights").values())) == job.setup.ranks, "stock Horovod reduces nothing"
    else:
        assert job.run(*program) != 0
        assert "object has no attribute 'ref'" in job.output()
        assert not job.notes("weights")
    assert job.run(*program, runner=RUN_FULL) == 0, job.output()
    weights = job.notes("weights")
    assert set(weights) == set(range(job.setup.ranks))
    assert len(set(weights.values())) == 1, "all ranks have the same weights, bit for bit"
    front_end = "horovod_partial.tensorflow.tape" if program == TAPE else "horovod_partial.keras.optimizer"
    assert all(modules.startswith(front_end) for modules in job.notes("trained").values())
    for ours, expected in zip(ast.literal_eval(weights[0]), weights_of_one_process(job.setup.ranks, 0.1), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.full_matrix("mpi")
def test_without_ours_they_are_horovods(job: Job) -> None:
    assert job.run("stock_torch", "ends") == 0, job.output()
    modules = "horovod.torch.optimizer horovod.torch.mpi_ops horovod.torch.mpi_ops"
    assert job.notes("trained") == dict.fromkeys(range(job.setup.ranks), modules)
