"""How a job ends: well, by a kill, by a signal, by an exception."""

import re
import signal
import time

import pytest
from harness.matrix import long_cases
from harness.whole_jobs import HandStarted, Job

# Each test here is a launch of its own, so the default run has few of them, with few ranks.
pytestmark = pytest.mark.launch(ranks=(2,))
LONG = pytest.mark.full_matrix
MODEL_POLICIES = ["group_average", "partial_reduce:2", "weighted_average:4,0.99"]
POLICIES = [*long_cases("full"), "solo", *long_cases("majority", *MODEL_POLICIES)]
MAINLY_TORCH = pytest.mark.parametrize("program", ["train", pytest.param("train_keras", marks=LONG)])
ELASTIC_PROGRAMS = pytest.mark.parametrize(
    ("program", "backend"),
    [
        ("elastic", ""),
        pytest.param("elastic_keras", "tensorflow", marks=LONG),
        pytest.param("elastic_keras", "torch", marks=LONG),
    ],
    ids=["elastic", "elastic_keras", "elastic_keras-torch"],
)
SHARING_PROGRAMS = pytest.mark.parametrize(
    ("program", "backend"),
    [("elastic_sharing", ""), ("elastic_sharing_keras", "tensorflow"), ("elastic_sharing_keras", "torch")],
    ids=["torch", "keras", "keras-torch"],
)
# What the specification allows, for a machine that does nothing else.
END_AFTER_KILL_SECONDS = 10.0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.full_matrix("mpi")
@MAINLY_TORCH
def test_exit_without_shutdown_is_clean(job: Job, program: str, policy: str) -> None:
    assert job.run(program, policy, "exit") == 0, job.output()
    assert len(job.notes("ended")) == job.setup.ranks
    assert not re.search(r"(?i)error|abort|terminate|traceback", job.output()), job.output()


@pytest.mark.launch(transports=("mpi",), full_transports=("mpi",))
def test_a_forked_child_ends_by_itself(job: Job) -> None:
    """It has no thread that runs Horovod's cycle, for which an exit handler would wait. (Gloo's own end breaks the parent.)"""
    assert job.run("forking") == 0, job.output()
    assert set(job.notes("child").values()) == {"0"}


@pytest.mark.parametrize("policy", ["solo", *long_cases("full", "majority")])
@pytest.mark.full_matrix("gloo")
@MAINLY_TORCH
def test_after_a_flush_a_rank_ends_in_silence(job: Job, program: str, policy: str) -> None:
    assert job.run(program, policy, "flushed") == 0, job.output()
    assert "this rank ends with" not in job.output()


@pytest.mark.parametrize("policy", [MODEL_POLICIES[-1], *long_cases("solo", *MODEL_POLICIES[:-1])])
@pytest.mark.full_matrix("gloo")
def test_ranks_with_unequal_steps_that_flush_end_in_silence(job: Job, policy: str) -> None:
    """Under averages by work, a rank that waits in its flush misses the signals of others' periods, and loses nothing."""
    assert job.run("train", policy, "uneven") == 0, job.output()
    assert "this rank ends with" not in job.output()


@pytest.mark.full_matrix("gloo")
@MAINLY_TORCH
def test_shutdown(job: Job, program: str) -> None:
    """An arrival after shutdown is refused; a second shutdown does nothing."""
    assert job.run(program, "solo", "shutdown") == 0, job.output()
    texts = set(job.notes("after-shutdown").values())
    assert texts == {"Horovod has not been initialized; use hvd.init()."}
    assert len(job.notes("ended")) == job.setup.ranks


@pytest.mark.launch(ranks=(4,))
@pytest.mark.parametrize("policy", ["majority", *long_cases("solo", *MODEL_POLICIES)])
@pytest.mark.full_matrix("gloo")
@MAINLY_TORCH
def test_a_rank_that_leaves_early(job: Job, program: str, policy: str) -> None:
    """It ends its process; the others go on, and know when it has ended. It is told that it has missed something."""
    assert job.run(program, policy, "early") == 0, job.output()
    assert len(job.notes("ended")) == job.setup.ranks
    if policy in ("solo", "majority"):
        told = (
            r"horovod_partial\[1\] WARNING: this rank ends with .* results that it has missed .* its model may differ"
        )
        assert re.search(told, job.output())


@pytest.mark.launch(ranks=(4,))
@pytest.mark.full_matrix
def test_rounds_that_only_a_copy_of_the_model_has_are_missed(job: Job) -> None:
    """It has taken rounds while it waited for Horovod, and ends without a step or a flush."""
    assert job.run("train", "solo", "metric") == 0, job.output()
    assert "horovod_partial[1] WARNING: this rank ends with" in job.output()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.full_matrix("gloo")
@MAINLY_TORCH
def test_a_killed_rank_ends_the_job(job: Job, program: str, policy: str) -> None:
    job.start(program, policy, "nothing")
    job.wait_for_notes("running")
    job.signal(signal.SIGKILL, rank=1)
    began = time.monotonic()
    assert job.wait() != 0
    assert time.monotonic() - began < END_AFTER_KILL_SECONDS


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.launch(transports=("gloo",), ranks=(4,))
@MAINLY_TORCH
def test_survivors_of_a_killed_rank_raise(job: Job, program: str, policy: str) -> None:
    """Started by hand: nobody ends the survivors, they must find out."""
    ranks = HandStarted(job.setup, job.folder)
    try:
        ranks.start(program, policy, "nothing")
        end = time.monotonic() + 90
        while len(job.notes("running")) < job.setup.ranks:
            assert time.monotonic() < end, ranks.output()
            assert all(process.poll() is None for process in ranks.processes), ranks.output()
            time.sleep(0.02)
        ranks.processes[1].kill()
        for rank, process in enumerate(ranks.processes):
            assert process.wait(60) != 0, f"rank {rank}\n{ranks.output()}"
    finally:
        ranks.close()
    survivors = set(range(job.setup.ranks)) - {1}
    assert set(job.notes("internal-error")) == survivors, ranks.output()


@pytest.mark.parametrize("policy", [pytest.param("full", marks=LONG), "solo"])
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=LONG)], ids=["SIGINT", "SIGTERM"])
@pytest.mark.full_matrix("mpi")
@MAINLY_TORCH
def test_a_signal_ends_the_job(job: Job, program: str, policy: str, number: signal.Signals) -> None:
    job.start(program, policy, "nothing")
    job.wait_for_notes("running")
    job.signal(number)
    # Horovod's launcher may call that a success: two of its threads ask for the status of a rank's shell, one loses it.
    job.wait(60)
    assert not job.notes("ended"), job.output()


@pytest.mark.parametrize("what", ["backward", *long_cases("raise", "caught")])
@pytest.mark.parametrize("policy", ["solo", pytest.param("full", marks=LONG)])
@pytest.mark.full_matrix("gloo")
@MAINLY_TORCH
def test_an_exception_on_one_rank_ends_the_job(job: Job, program: str, policy: str, what: str) -> None:
    """The others are told of it, and by whom."""
    job.start(program, policy, what)
    assert job.wait(60) != 0
    told = r"horovod_partial\[0\] ERROR: rank 1 has failed: \S*Error: "  # TensorFlow's own, around what was raised
    assert re.search(told, job.output()), job.output()
    assert "planned failure" in job.output(), job.output()


@pytest.mark.full_matrix("mpi")
@MAINLY_TORCH
def test_an_exit_status_on_one_rank_ends_the_job(job: Job, program: str) -> None:
    """The others get an error, while the process of that rank is still there: not its launcher ends them."""
    job.start(program, "solo", "sys.exit")
    assert job.wait() != 0
    why = "rank 1 has failed: it exits with status 7. Horovod has been shut down"
    assert why in job.notes("internal-error")[0], job.output()


@pytest.mark.full_matrix("gloo")
@pytest.mark.launch(ranks=(4,))
def test_a_failure_is_told_in_all_process_sets(job: Job) -> None:
    """Also where the rank that fails is not in them, and by its number among all ranks."""
    assert job.run("fail_in_process_set") != 0
    for when in ("waiting", "later"):
        told = job.notes(when)
        assert set(told) == {0, 2}, job.output()
        for text in told.values():
            assert text.startswith("rank 3 has failed: RuntimeError: planned failure. Horovod has been shut down"), text


@pytest.mark.full_matrix  # Horovod's start-up over Gloo aborts now and then when it is repeated in one launch
@pytest.mark.launch(transports=("gloo",))  # over MPI Horovod's own shutdown finalizes MPI, and a second init aborts
def test_shutdown_then_init(job: Job) -> None:
    assert job.run("restart") == 0, job.output()
    size = float(job.setup.ranks)
    assert set(job.notes("results").values()) == {repr([[size] * 3, [size] * 4])}
    assert set(job.notes("plans").values()) == {repr([number >= 2 for _ in range(2) for number in range(5)])}


@pytest.mark.full_matrix("gloo")
def test_a_rank_whose_optimizer_is_gone_tells_what_it_lacks(job: Job) -> None:
    assert job.run("local_optimizer") == 0, job.output()
    assert len(set(job.notes("weight").values())) > 1
    assert "So its model may differ from those of other ranks" in job.output()


@pytest.mark.full_matrix
@pytest.mark.launch(transports=("gloo",))
def test_a_function_that_was_traced_before_a_restart_is_flushed(job: Job) -> None:
    """A rank that runs the function of an earlier generation flushes together with a rank that is new."""
    assert job.run("restart_keras", KERAS_BACKEND="tensorflow") == 0, job.output()
    for generation in range(2):
        assert len(set(job.notes(f"weights{generation}").values())) == 1, job.output()
        assert set(job.notes(f"rounds{generation}").values()) == {"True"}
    assert "WARNING" not in job.output(), job.output()


# Horovod's elastic jobs run over Gloo.
@pytest.mark.launch(transports=("gloo",), ranks=(2,))
@pytest.mark.full_matrix  # in the default run the next test adds one
@pytest.mark.parametrize("policy", ["full", "majority"])
@ELASTIC_PROGRAMS
def test_a_rank_is_added_to_an_elastic_job(job: Job, program: str, backend: str, policy: str) -> None:
    ended = job.run_elastic(program, policy, "3", KERAS_BACKEND=backend)
    assert ended == dict.fromkeys(range(3), "3 True True"), job.output()


@pytest.mark.launch(transports=("gloo",), ranks=(2,))
@pytest.mark.parametrize("policy", [pytest.param("majority", marks=LONG), "group_average"])
def test_an_elastic_function_that_wraps_its_optimizer(job: Job, policy: str) -> None:
    """A worker that joins has wrapped once, the others twice: their buckets have the same names all the same."""
    ended = job.run_elastic("elastic", policy, "3", "inside")
    assert ended == dict.fromkeys(range(3), "3 True True"), job.output()


@pytest.mark.launch(transports=("gloo",), ranks=(2,))
@pytest.mark.parametrize("policy", ["group_average", *long_cases("partial_reduce:2", "solo")])
def test_an_elastic_job_shrinks_to_one_rank(job: Job, policy: str) -> None:
    ended = job.run_elastic("elastic", policy, "1", hosts="localhost:1\n127.0.0.1:1\n", then="localhost:1\n")
    assert list(ended.values()) == ["1 True True"], job.output()


@pytest.mark.launch(transports=("gloo",), ranks=(3,))
@pytest.mark.full_matrix  # survivors may find out only by Gloo's timeout of 30 s
@pytest.mark.parametrize("policy", ["full", "majority", "solo"])
@ELASTIC_PROGRAMS
def test_a_rank_of_an_elastic_job_is_killed(job: Job, program: str, backend: str, policy: str) -> None:
    """It dies with several buckets under way; the others restore the last commit and go on."""
    variables = {"KERAS_BACKEND": backend, "HOROVOD_PARTIAL_BUCKET_MB": "0.001"}
    job.start_elastic(program, policy, "2", hosts="localhost:2\n127.0.0.1:1\n", **variables)
    job.wait()
    assert list(job.notes("ended").values()) == ["2 True True"] * 2, job.output()


@pytest.mark.launch(transports=("gloo",), ranks=(3,))
@pytest.mark.full_matrix  # as above
@SHARING_PROGRAMS
def test_a_rank_that_shares_work_is_killed(job: Job, program: str, backend: str) -> None:
    """Each sample is once in an update of each epoch: those since the last commit are made again."""
    job.start_elastic(program, hosts="localhost:2\n127.0.0.1:1\n", KERAS_BACKEND=backend)
    job.wait()
    assert list(job.notes("ended").values()) == ["2 [2.0]"] * 2, job.output()


@pytest.mark.launch(transports=("gloo",), ranks=(2,))
@pytest.mark.full_matrix
@SHARING_PROGRAMS
def test_a_rank_is_added_to_those_that_share_work(job: Job, program: str, backend: str) -> None:
    ended = job.run_elastic(program, KERAS_BACKEND=backend)
    assert ended == dict.fromkeys(range(3), "3 [2.0]"), job.output()


@pytest.mark.full_matrix("gloo")
def test_i6_a_wait_ends_when_horovod_is_shut_down(job: Job) -> None:
    assert job.run("stale_handle") == 0, job.output()
    assert re.search("(?i)shut ?down", job.notes("result")[0]), job.notes("result")


@pytest.mark.full_matrix("gloo")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", ["torch", pytest.param("tensorflow", marks=LONG)])
def test_two_frameworks_in_one_process(job: Job, first: str) -> None:
    """[run] The second library's objects use the first one's virtual tables."""
    assert job.run("two_frameworks", first) == 0, job.output()
    assert len(job.notes("done")) == job.setup.ranks


@pytest.mark.full_matrix("gloo")
def test_a_rank_takes_the_setting_of_rank_0(job: Job) -> None:
    assert job.run("settings", "0", "solo") == 0, job.output()
    assert job.notes("settled") == dict.fromkeys(range(job.setup.ranks), "solo")
    text = "horovod_partial[1] WARNING: HOROVOD_PARTIAL_SYNC=solo is set on rank 0 and not here; this rank takes it"
    assert job.output().count(text) == 1


@pytest.mark.full_matrix("mpi")
def test_a_setting_of_one_rank_is_refused_on_all(job: Job) -> None:
    assert job.run("settings", "1", "solo") == 0, job.output()
    text = "HOROVOD_PARTIAL_SYNC is solo on rank 1, but not set, that is full, on rank 0: set it alike on every rank"
    refused = job.notes("refused")
    assert len(refused) == job.setup.ranks
    assert all(one.startswith(text) for one in refused.values()), refused


@pytest.mark.launch(ranks=(3,))
@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        pytest.param(
            "everything",
            [
                "rank 0 waits in a collective of Horovod's own",
                "rank 1 waits in a flush",
                r"rank 2 waits in round 0 of DistributedOptimizer.* \[0.weight \(2, 2\) and 1 more\]",
            ],
            marks=pytest.mark.full_matrix("gloo"),
        ),
        *(
            pytest.param(kind, texts, marks=LONG)
            for kind, texts in {
                "layers": ["rank 1 has 1.weight \\(2, 2\\) instead of no more of rank 0"],
                "names": ["rank 1 has other.0.weight \\(2, 4\\) instead of 0.weight \\(2, 4\\) of rank 0"],
                "one-more": ["one rank has wrapped an optimizer more than another, or in another order"],
                "process-sets": [f"rank {rank} waits in round 0 of .* of another process set" for rank in range(3)],
                "groups": ["ranks 0 2 wait in round 0 of", "rank 1 waits in round 0 of"],
                "full": ["rank 1 waits in a collective of Horovod's own", "ranks 0 2 wait in round 0 of"],
                "models": [r"rank 1 waits in round 0 .* \(GroupAverage", r"ranks 0 2 wait in round 0 of .* \(Majority"],
                "flush": ["ranks 0 2 wait in a collective of Horovod's own", "rank 1 waits in a flush"],
            }.items()
        ),
    ],
)
def test_ranks_that_disagree_fail_with_what_differs(job: Job, kind: str, texts: list[str]) -> None:
    assert job.run("disagree", kind, HOROVOD_STALL_CHECK_TIME_SECONDS="5") != 0  # 20 s if it is not set
    for text in ("Ranks wait for each other", *texts):
        assert re.search(text, job.output() + str(job.notes("error"))), job.output()
    # Who was in a collective of Horovod's own has it in its log, and gets Horovod's own error.
    for rank, error in job.notes("error").items():
        told = "Ranks wait for each other" in error or f"horovod_partial[{rank}] ERROR: Ranks wait" in job.output()
        assert told, (rank, error, job.output())


@pytest.mark.full_matrix("mpi")
def test_a_library_is_attached_while_other_threads_shake_hands(job: Job) -> None:
    """Attaching has the interpreter's lock, a handshake asks for it: neither may hold what the other one waits for."""
    assert job.run("first_operation") == 0, job.output()
    total = sum(10**rank for rank in range(job.setup.ranks))
    assert set(job.notes("results").values()) == {repr([("a", total), ("b", total)])}


@pytest.mark.full_matrix("mpi")
def test_ranks_of_different_versions_say_so_and_send_nothing(job: Job) -> None:
    """After a handshake that has failed, hooks only call Horovod's functions."""
    timeline = job.folder / "timeline.json"  # what has come to rank 0
    assert job.run("another_version", HOROVOD_TIMELINE=str(timeline)) == 0, job.output()
    errors = job.notes("error")
    assert set(errors) == set(range(1, job.setup.ranks))
    assert all("different versions" in error for error in errors.values()), errors
    assert set(job.notes("total").values()) == {str(sum(10**rank for rank in range(job.setup.ranks)))}
    assert "allreduce.late" in timeline.read_text()
    assert not re.search(r"horovod_partial(?!\.agreement)", timeline.read_text())


@LONG
def test_a_rank_that_hangs_and_is_killed(job: Job) -> None:
    """A rank computes no more; it is killed in the end, and the job ends."""
    job.start("train", "quorum:1.0", "stop")
    job.wait_for_notes("stopped", 1)
    job.signal(signal.SIGKILL, rank=1)
    assert job.wait() != 0
