"""Recordings of real jobs: who is slow shows, whatever the policy, the framework and the end."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
from harness.whole_jobs import Job

from horovod_partial._core import PARTS
from horovod_partial.insight import recording
from horovod_partial.insight.recording import Clocks, JobSteps, RankSteps, Recording

pytestmark = pytest.mark.launch(ranks=(3,))
SLEEP = 0.1  # seconds, of the slow rank in each step
HEARTBEATS = "3"  # seconds, in which each rank gives ten
FOR_GLOO = pytest.mark.full_matrix("mpi")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the ranks record."""
    return tmp_path / "recordings"


def record(job: Job, folder: Path, program: str, *arguments: str, **variables: str) -> Recording:
    """Run a program to its end while it is watched; its newest recording."""
    watched = {"HOROVOD_PARTIAL_WATCH": "1", "HOROVOD_PARTIAL_STALL_SECONDS": HEARTBEATS}
    assert job.run(program, *arguments, HOROVOD_PARTIAL_RECORD=str(folder), **watched, **variables) == 0, job.output()
    return recording.load(folder)


def steps_of(recorded: Recording) -> JobSteps:
    return JobSteps.of(recorded, Clocks.fit(recorded))


def check_the_last_rank_is_slow(steps: JobSteps) -> None:
    *others, slow = (float(np.median(of_rank.compute)) for of_rank in steps.ranks)
    assert max(others) < SLEEP <= slow


@FOR_GLOO
@pytest.mark.parametrize(
    ("policy", "what"),
    [("full", "metric"), ("majority", "whole"), pytest.param("full", "whole", marks=pytest.mark.full_matrix)],
)
def test_who_is_slow_shows(job: Job, folder: Path, policy: str, what: str) -> None:
    steps = 20
    recorded = record(job, folder, "recorded", policy, str(steps), what)
    assert sorted(recorded.ranks) == [0, 1, 2]
    assert recorded.remarks == ()
    found = steps_of(recorded)
    assert found.rounds == (policy != "full")
    assert [len(of_rank.step) for of_rank in found.ranks] == [steps - 1] * 3  # nothing tells when the first one began
    check_the_last_rank_is_slow(found)
    takes = r"rank 2 takes \S+ times \(95 %: \S+ to \S+\) as long as the median rank, in [^:]+"
    assert re.search(rf"{takes}: \d+ % of the excess is waiting for data", job.output()), job.output()
    if policy == "full":
        assert np.median(found.ranks[0].wait) > SLEEP / 2  # the fast wait for the slow one
    else:
        rounds = recorded.ranks[0].tables["rounds"]
        late = [2 in missing for missing in rounds["missing"]]
        delivered = [2 in ranks for ranks in rounds["delivered"]]
        assert any(late)
        assert any(delivered)


@FOR_GLOO
@pytest.mark.parametrize("policy", ["full", pytest.param("majority", marks=pytest.mark.full_matrix)])
def test_a_rank_that_has_joined_takes_no_steps(job: Job, folder: Path, policy: str) -> None:
    found = steps_of(record(job, folder, "recorded", policy, "20", "uneven"))
    assert [len(of_rank.step) for of_rank in found.ranks] == [19, 29, 39]
    assert set(re.findall(r"rank (\d) takes", job.output())) == {"2"}, job.output()


@FOR_GLOO
def test_who_made_the_micro_batches_shows(job: Job, folder: Path) -> None:
    found = steps_of(record(job, folder, "recorded", "work_sharing", "20", "whole"))
    assert set(re.findall(r"rank (\d) takes", job.output())) <= {"2"}, job.output()
    assert (found.rounds, found.passes) == (True, 2)
    common = found.common()
    made = np.array([of_rank.micro_batches for of_rank in common.ranks])
    assert made.shape[1] >= 15
    assert set(made.sum(axis=0)) == {6}
    assert made[2].sum() < made[0].sum()
    *others, slow = np.median(common.compute, axis=0)
    assert max(others) < 2 * SLEEP <= slow  # of two micro-batches


@FOR_GLOO
@pytest.mark.launch(framework="tensorflow")
@pytest.mark.parametrize("policy", ["majority", pytest.param("full", marks=pytest.mark.full_matrix)])
def test_keras(job: Job, folder: Path, policy: str) -> None:
    recorded = record(job, folder, "train_keras", policy, "flushed")
    found = steps_of(recorded)
    assert found.rounds == (policy != "full")
    assert min(len(of_rank.step) for of_rank in found.ranks) >= 15
    assert all((of_rank.compute >= 0).all() for of_rank in found.ranks)
    assert all((of_rank.parts == -1).all() for of_rank in found.ranks), "a graph fetches the batches"


@pytest.mark.full_matrix
@pytest.mark.parametrize("policy", ["group_average:2", "partial_reduce:2", "weighted_average:4,0.99"])
def test_averages_of_models(job: Job, folder: Path, policy: str) -> None:
    found = steps_of(record(job, folder, "recorded", policy, "20", "whole"))
    assert found.rounds
    if "weighted" not in policy:  # whose ranks average every few steps, after those
        check_the_last_rank_is_slow(found)


@pytest.mark.parametrize("policy", ["majority", pytest.param("full", marks=pytest.mark.full_matrix)])
@pytest.mark.full_matrix("gloo")
def test_a_rank_that_is_killed_leaves_a_recording(job: Job, folder: Path, policy: str) -> None:
    job.start("recorded", policy, "0", "for_ever", HOROVOD_PARTIAL_RECORD=str(folder))

    def rank_1_has_written() -> bool:
        file = next(folder.glob("*/rank-1.0000.jsonl"), None)
        return file is not None and file.read_text().count('"table":"reductions"') > 2

    job.until(rank_1_has_written, "rank 1 has written")
    job.signal(signal.SIGKILL, rank=1)
    assert job.wait() != 0
    recorded = recording.load(folder)
    assert sorted(recorded.ranks) == [0, 1, 2]
    assert not recorded.ranks[1].ended
    assert any("No end was recorded on rank" in remark for remark in recorded.remarks)
    assert len(next(of_rank for of_rank in steps_of(recorded).ranks if of_rank.rank == 1).step) > 5


@pytest.mark.full_matrix("gloo")
def test_a_program_records_itself(job: Job, folder: Path) -> None:
    assert job.run("recorded", "majority", "20", "late") == 0, job.output()
    assert set(job.notes("twice").values()) == {"this rank is being recorded already"}
    recorded = recording.load(folder)
    assert [len(of_rank.step) for of_rank in steps_of(recorded).ranks] == [14] * 3
    assert recorded.remarks == ()


@pytest.mark.launch(ranks=(3,), transports=("gloo",))  # MPI ends once
@pytest.mark.full_matrix
def test_each_generation_of_horovod_has_a_folder(job: Job, folder: Path) -> None:
    record(job, folder, "recorded", "majority", "10", "again")
    runs = recording.runs(folder)
    assert len(runs) == 2
    for run in runs:
        recorded = recording.load(folder, run)
        assert sorted(recorded.ranks) == [0, 1, 2]
        assert recorded.remarks == ()


@pytest.mark.full_matrix("gloo")
def test_a_folder_that_cannot_be_made_does_not_end_the_training(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert job.run("recorded", "majority", "5", "whole", HOROVOD_PARTIAL_RECORD=str(tmp_path / "file")) == 0
    assert job.output().count("this rank is not recorded: cannot make the folder") == 3, job.output()
    assert len(job.notes("ended")) == 3


@pytest.mark.full_matrix  # in the default run the next test records one
def test_an_unedited_program_is_recorded(job: Job, folder: Path) -> None:
    job.start("stock_torch", "ends", runner=("-m", "horovod_partial", "run", "--record", str(folder)))
    assert job.wait() == 0, job.output()
    found = steps_of(recording.load(folder))
    assert not found.rounds
    assert [len(of_rank.step) for of_rank in found.ranks] == [19] * 3


# --- The parts of a step ----------------------------------------------------------------------------------------------


def medians(steps: RankSteps, rows: slice) -> dict[str, float]:
    """The median of each part over some steps, in seconds; -1 if it is unknown in any of them."""
    unknown = (steps.parts[rows] < 0).any(axis=0)
    return dict(zip(PARTS, np.where(unknown, -1, np.median(steps.parts[rows], axis=0)).tolist(), strict=True))


def check_parts_make_up_the_compute(steps: RankSteps) -> None:
    known = steps.parts[:, 0] >= 0
    assert known.sum() >= len(known) - 4
    assert np.maximum(steps.parts, 0).sum(axis=1)[known] == pytest.approx(steps.compute[known], abs=2e-5)


@FOR_GLOO
def test_what_a_slow_rank_does_in_an_unedited_program(job: Job, folder: Path) -> None:
    """Each phase of the program has a part in which ranks are slow."""
    job.start("parts", "torch", runner=("-m", "horovod_partial", "run", "--watch", "--record", str(folder)))
    assert job.wait() == 0, job.output()
    steps_each, sleep = 8, 0.05
    ranks = steps_of(recording.load(folder)).ranks
    for steps in ranks:
        check_parts_make_up_the_compute(steps)
        assert steps.step.tolist() == [*range(1, 6 * steps_each)]
    phases = ("loader", "loaders", "forward", "backward", "evaluation", "passes")
    for phase, name in enumerate(phases):
        rows = slice(phase * steps_each + 1, (phase + 1) * steps_each - 2)  # without the first step of the phase
        of_ranks = [medians(steps, rows) for steps in ranks]
        part = {"loaders": "loader", "evaluation": "other", "passes": "loader"}.get(name, name)
        slow = {"loaders": [0, 1, 2], "evaluation": [0]}.get(name, [2])
        for rank, of in enumerate(of_ranks):
            print(name, rank, {key: round(value, 4) for key, value in of.items()})
            assert (of[part] >= 0.9 * sleep) == (rank in slow), (name, rank, of)
            assert all(value < 0.9 * sleep for key, value in of.items() if key != part), (name, rank, of)
            assert (of["forward"] == -1) == (name == "passes"), "two passes cannot be told apart"
            assert of["optimizer"] >= 0


@pytest.mark.full_matrix
@pytest.mark.parametrize("policy", ["majority", "work_sharing"])
def test_parts_under_a_partial_policy(job: Job, folder: Path, policy: str) -> None:
    *others, slow = steps_of(record(job, folder, "recorded", policy, "20", "whole")).ranks
    for steps in (*others, slow):
        check_parts_make_up_the_compute(steps)
    assert medians(slow, slice(2, -2))["loader"] >= 0.9 * SLEEP
    assert all(medians(steps, slice(2, -2))["loader"] < SLEEP / 2 for steps in others)


@pytest.mark.launch(framework="tensorflow")
@pytest.mark.parametrize(("what", "backend"), [("tape", "tensorflow"), ("keras", "torch")])
@pytest.mark.full_matrix
def test_parts_in_other_frameworks(job: Job, folder: Path, what: str, backend: str) -> None:
    *others, slow = steps_of(record(job, folder, "parts", what, KERAS_BACKEND=backend)).ranks
    rows = slice(4, -2)  # a graph is traced in the first steps
    assert medians(slow, rows)["loader"] >= 0.9 * 0.05
    assert all(medians(steps, rows)["loader"] < 0.05 for steps in others)
    assert medians(slow, rows)["optimizer"] == -1, "the step of Keras's optimizer is not seen"
