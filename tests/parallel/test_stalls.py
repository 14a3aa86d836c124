"""A long wait explains itself: who waits, who is missing, who is stopped, and where their programs are (protocol, rule 14)."""

import os
import re
import signal

import pytest
from harness.stalls import OVER, TOLD, explains, stacks, told
from harness.whole_jobs import Job

# Each test here is a launch of its own.
pytestmark = pytest.mark.launch(ranks=(4,))
LONG = pytest.mark.full_matrix
SECONDS = "2"
# The coordinator finds the same waits long, and later. It must leave them to the heartbeats, which have said more.
COORDINATOR_TOO = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "6"}
# Where the others wait for the one that is asleep.
OTHERS_WAIT = {"asleep": "", "flush": "in a flush", "collective": "in Horovod's barrier"}


def start(job: Job, policy: str, what: str, **variables: str) -> None:
    job.start("stall", policy, what, str(job.setup.ranks), HOROVOD_PARTIAL_STALL_SECONDS=SECONDS, **variables)


def ends(job: Job) -> None:
    """The sleeper goes on, and the job ends well; the wait was told once, and its end too."""
    job.say("go-on")
    job.until(lambda: OVER in job.output(), "the end of the wait is told")
    job.say("end")
    assert job.wait() == 0, job.output()
    assert len(told(job.output())) == 1, job.output()
    assert job.output().count(OVER) == 1, job.output()


@pytest.mark.full_matrix("mpi")
@pytest.mark.parametrize("policy", ["majority", pytest.param("full", marks=LONG)])
def test_one_is_asleep_and_one_is_stopped(job: Job, policy: str) -> None:
    start(job, policy, "stopped")
    job.until(lambda: explains(job.output(), sleeper=2, stopped=3, waiting=(0, 1)), "the wait is explained")
    assert not stacks(job.output(), 3)
    job.signal(signal.SIGCONT, rank=3)
    ends(job)


@pytest.mark.full_matrix("gloo")
@pytest.mark.parametrize(
    ("policy", "what"),
    [
        pytest.param("majority", "asleep", marks=LONG),
        ("full", "asleep"),
        *(pytest.param("solo", what, marks=LONG) for what in OTHERS_WAIT),
    ],
)
def test_one_is_asleep(job: Job, policy: str, what: str) -> None:
    start(job, policy, what, **COORDINATOR_TOO)
    job.until(lambda: explains(job.output(), sleeper=2, waiting=(0, 1, 3)), "the wait is explained")
    assert OTHERS_WAIT[what] in told(job.output())[0]
    ends(job)


@LONG
def test_a_rank_keeps_the_interpreters_lock(job: Job) -> None:
    os.mkfifo(job.folder / "pipe")
    start(job, "majority", "keeps-lock")
    job.until(lambda: explains(job.output(), sleeper=2, waiting=(0, 1, 3)), "the wait is explained")
    with (job.folder / "pipe").open("wb") as pipe:
        pipe.write(b"x")
    ends(job)


@LONG
@pytest.mark.parametrize("policy", ["majority", "full"])
def test_rank_0_is_stopped(job: Job, policy: str) -> None:
    start(job, policy, "center-stopped")
    lines = "rank 0 has given no sign of life"
    job.until(lambda: all(stacks(job.output(), rank) for rank in (1, 2, 3)), "all others have written their stacks")
    assert job.output().count(lines) == 3
    assert "sleep_between_steps" in stacks(job.output(), 2)
    job.signal(signal.SIGCONT, rank=0)
    job.say("go-on")
    job.say("end")
    assert job.wait() == 0, job.output()


@LONG
@pytest.mark.parametrize("policy", ["majority", "full"])
def test_nobody_waits(job: Job, policy: str) -> None:
    """All compute for long, and come to their end one after the other."""
    start(job, policy, "nobody")
    assert job.wait() == 0, job.output()
    assert len(job.notes("ended")) == job.setup.ranks
    assert not re.search(f"{TOLD}|The stacks", job.output()), job.output()


@LONG
def test_a_job_that_is_stopped_as_a_whole_accuses_nobody(job: Job) -> None:
    start(job, "majority", "nobody", HOROVOD_PARTIAL_ABORT_SECONDS="2")
    job.wait_for_notes("begun")
    for number in (signal.SIGSTOP, signal.SIGCONT) * 3:
        for rank in range(job.setup.ranks):
            job.signal(number, rank)
    assert job.wait() == 0, job.output()
    assert not re.search(f"{TOLD}|The stacks", job.output()), job.output()


@LONG
@pytest.mark.parametrize("variable", ["HOROVOD_STALL_CHECK_DISABLE", "HOROVOD_PARTIAL_STALL_SECONDS"])
def test_it_can_be_turned_off(job: Job, variable: str) -> None:
    """Then nobody gives signs of life, and none can ask for stacks. The coordinator warns, unless Horovod's check is off."""
    off = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_PARTIAL_STALL_SECONDS": "0"}[variable]
    variables = {"HOROVOD_PARTIAL_STALL_SECONDS": SECONDS, **COORDINATOR_TOO, variable: off}
    job.start("stall", "majority", "asleep", str(job.setup.ranks), **variables)
    job.wait_for_notes("missing", 1)
    assert set(job.notes("watched").values()) == {"False"}
    if variable == "HOROVOD_PARTIAL_STALL_SECONDS":
        warning = re.compile(f"{TOLD}round [0-9]+ of .* waits for ranks")
        job.until(lambda: any(map(warning.search, told(job.output()))), "the coordinator warns")
    job.say("go-on")
    job.say("end")
    assert job.wait() == 0, job.output()
    assert "The stacks" not in job.output()
