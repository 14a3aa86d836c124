"""Recordings, read back: what is missing is told, clocks are compared, and steps are those that were written."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic_recordings as synthetic
from synthetic_recordings import Host, Job

from horovod_partial.insight import recording
from horovod_partial.insight.recording import Clocks, JobSteps
from horovod_partial.insight.recording.steps import other_waits

TWO_HOSTS = [Host("worker-0"), Host("worker-1", offset=4.2, drift=50e-6)]


def written(folder: Path, **options: object) -> Path:
    job = Job(**{"compute": synthetic.even(30, 4), "quorum": 2, **options})  # type: ignore[arg-type]
    return synthetic.write(folder, job)


def steps_of(folder: Path) -> JobSteps:
    read = recording.load(folder)
    return JobSteps.of(read, Clocks.fit(read))


# --- Reading ----------------------------------------------------------------------------------------------------------


def test_all_ranks_and_segments_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, segments=3)
    (path / "notes.txt").write_text("no recording")
    (tmp_path / "other").mkdir()
    read = recording.load(tmp_path)
    assert (read.run, read.size, list(read.ranks), read.remarks) == (synthetic.RUN, 4, [0, 1, 2, 3], ())
    for rank in read.ranks.values():
        assert rank.tables["steps"]["step"].tolist() == [*range(30)]
        assert sorted(bucket.name for bucket in rank.buckets.values()) == list(synthetic.BUCKETS)
    rounds = read.ranks[0].tables["rounds"]
    assert rounds["reason"][0] == "first"
    assert rounds["missing"][0] == []
    assert any(rounds["delivered"])


def test_the_newest_run_is_read_unless_another_is_named(tmp_path: Path) -> None:
    older, newer = "20261123T223115.123456Z", "20261124T000000.000000Z"
    for run in (newer, older):
        written(tmp_path, run=run)
    assert list(recording.runs(tmp_path)) == [older, newer]
    assert recording.load(tmp_path).run == newer
    assert recording.load(tmp_path, older).run == older
    assert recording.load(tmp_path / older).run == older
    with pytest.raises(ValueError, match=f"holds no run yesterday; there are {older}, {newer}"):
        recording.load(tmp_path, "yesterday")


def test_a_file_may_be_cut_off_anywhere(tmp_path: Path) -> None:
    path = written(tmp_path)
    file = path / "rank-2.0.jsonl"
    raw = file.read_bytes()
    whole = len(raw.splitlines()[0])
    for cut in range(0, len(raw), 97):
        file.write_bytes(raw[:cut])
        read = recording.load(tmp_path)
        assert (2 in read.ranks) == (cut >= whole)
        assert any("2" in remark for remark in read.remarks), "no word of what is missing"


def test_ranks_that_are_missing_are_told(tmp_path: Path) -> None:
    path = written(tmp_path)
    for rank in (0, 2):
        (path / f"rank-{rank}.0.jsonl").unlink()
    assert recording.load(tmp_path).remarks == ("Of 4 ranks there are no files of 0, 2.",)
    assert [steps.rank for steps in steps_of(tmp_path).ranks] == [1, 3]


@pytest.mark.parametrize(("quorum", "passes", "steps"), [(None, 0, 29), (2, 0, 29), (None, 4, 28)])
def test_a_job_that_was_killed_says_so(tmp_path: Path, quorum: int | None, passes: int, steps: int) -> None:
    written(tmp_path, quorum=quorum, passes=passes, ended=False)
    (remark,) = recording.load(tmp_path).remarks
    assert remark == "No end was recorded on ranks 0, 1, 2, 3: killed, or still running."
    # The first of 30 steps has no begin. Under work sharing nothing tells whether the last update is whole.
    assert {len(rank.step) for rank in steps_of(tmp_path).ranks} == {steps}


@pytest.mark.parametrize(("missing", "first", "told"), [([0], 1, "were dropped"), ([0, 2], 3, "segment 2 is missing")])
@pytest.mark.parametrize("quorum", [None, 2, 4])
def test_steps_behind_segments_that_are_missing(
    tmp_path: Path, missing: list[int], first: int, told: str, quorum: int | None
) -> None:
    path = written(tmp_path, compute=synthetic.even(100, 4), segments=5, quorum=quorum)
    whole = {steps.rank: steps for steps in steps_of(tmp_path).ranks}[1]
    for segment in missing:
        (path / f"rank-1.{segment}.jsonl").unlink()
    (remark,) = recording.load(tmp_path).remarks
    assert remark.startswith(f"Rank 1: the segments before {first}")
    assert told in remark
    left = {steps.rank: steps for steps in steps_of(tmp_path).ranks}[1]
    assert 0 < len(left.step) < len(whole.step)
    same = np.isin(whole.step, left.step)
    for name in ("begin", "handed", "result", "late", "staleness", "reduce", "wait"):
        assert np.array_equal(getattr(whole, name)[same], getattr(left, name)), name


def test_recordings_with_and_without_the_parts_of_steps_are_read(tmp_path: Path) -> None:
    written(tmp_path)
    assert all((steps.parts == -1).all() for steps in steps_of(tmp_path).ranks)
    compute = synthetic.even(30, 4)
    path = written(tmp_path / "parts", compute=compute, loader=compute / 4, quorum=None)
    for steps in steps_of(tmp_path / "parts").ranks:
        loader, forward, backward, optimizer, other = steps.parts.T
        assert loader == pytest.approx(compute[1:, steps.rank] / 4, abs=1e-6)
        assert forward == pytest.approx(compute[1:, steps.rank] * 3 / 8, abs=1e-6)
        assert np.array_equal(forward, backward)
        assert not optimizer.any()
        assert not other.any()
    spoil(path, 2, optimizer=None)
    with pytest.raises(ValueError, match="table 'steps' has no column 'optimizer'"):
        steps_of(tmp_path / "parts")


def test_tables_and_columns_of_later_versions_are_left_unread(tmp_path: Path) -> None:
    path = written(tmp_path)
    file = path / "rank-0.0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [lines[0], {"table": "weather", "time": [1]}, *({**line, "colour": []} for line in lines[1:])]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert recording.load(tmp_path).remarks == ()


def spoil(path: Path, number: int, **changes: object) -> None:
    """Change a line of rank 1's file."""
    file = path / "rank-1.0.jsonl"
    lines = file.read_text().splitlines()
    lines[number] = json.dumps({**json.loads(lines[number]), **changes})
    file.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (0, {"version": 1}, "version 1, and this horovod-partial reads 2"),
        (0, {"format": "other"}, "no recording of horovod-partial"),
        (0, {"rank": 3}, "is of rank 3, segment 0"),
        (0, {"size": "many"}, "size"),
        (0, {"size": 1}, "there is no rank 1 of 1"),
        (0, {"steady": -1}, "are not valid times"),
        (0, {"run": "20260101T000000.000000Z"}, "holds files of several runs"),
        (1, {"bytes": [1]}, "line 2: the columns of table 'buckets' differ in length"),
        (1, {"bytes": None}, "line 2: table 'buckets' has no column 'bytes'"),
        (1, {"bytes": [1, 2.5]}, "line 2: column 'bytes' of table 'buckets' holds a value that is not of type int"),
        (1, {"bytes": [1, 2**70]}, "more than 64 bits"),
        (1, {"bucket": [7, 8]}, "has buckets that no line names"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, number: int, changes: dict[str, object], message: str) -> None:
    spoil(written(tmp_path), number, **changes)
    with pytest.raises(ValueError, match=message):
        recording.load(tmp_path)


def test_a_line_in_the_middle_must_be_whole(tmp_path: Path) -> None:
    file = written(tmp_path) / "rank-1.0.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], lines[2][:20], *lines[3:]]))
    with pytest.raises(ValueError, match="line 3 is not JSON; only the last line may be cut off"):
        recording.load(tmp_path)


def test_folders_without_recordings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        recording.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no recording"):
        recording.load(tmp_path)


# --- Clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("quorum", [None, 3])
def test_offsets_and_drifts_are_recovered(tmp_path: Path, seed: int, quorum: int | None) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    hosts = [Host(f"worker-{i}", *rng.uniform([-5, -50e-6], [5, 50e-6]), wall_error=1.0) for i in range(4)]  # type: ignore[arg-type]
    compute = synthetic.even(200, 8, seconds=0.5, noise=0.3, seed=seed)
    written(tmp_path, compute=compute, quorum=quorum, hosts=hosts, late_ends=0.2, seed=seed)
    read = recording.load(tmp_path)
    clocks = Clocks.fit(read)
    for rank in read.ranks.values():
        host = hosts[rank.rank % len(hosts)]
        for moment in (1.0, 50.0, 100.0):  # of the job, which rank 0 began to record at 0
            own = round(1e6 * (synthetic.BOOT + host.offset + (1 + host.drift) * moment)) - rank.steady
            seen = clocks.seconds(rank, np.array([own]))[0]
            assert seen == pytest.approx((1 + hosts[0].drift) * moment, abs=5e-3)
    for host_clock in list(clocks.hosts.values())[1:]:
        assert host_clock.source == "reductions"
        assert host_clock.reductions > 100
        assert host_clock.median_residual < 1e-3
        assert host_clock.median_residual < host_clock.residual_95 < 0.05
        assert f"{host_clock.reductions} reductions of all ranks; ends lie 0." in str(host_clock)


def test_ranks_of_one_host_share_its_clock(tmp_path: Path) -> None:
    written(tmp_path, compute=synthetic.even(4, 4))
    read = recording.load(tmp_path)
    clocks = Clocks.fit(read)
    assert list(clocks.hosts) == ["worker-0"]
    starts = [clocks.seconds(rank, np.array([0]))[0] for rank in read.ranks.values()]
    assert starts == pytest.approx([0.0, 0.01, 0.02, 0.03], abs=1e-5)


def test_wall_clocks_stand_in_for_too_few_reductions(tmp_path: Path) -> None:
    hosts = [Host("worker-0"), Host("worker-1", offset=3.0, wall_error=0.25)]
    written(tmp_path, compute=synthetic.even(3, 4), quorum=None, hosts=hosts)
    clock = Clocks.fit(recording.load(tmp_path)).hosts["worker-1"]
    assert clock.source == "wall"
    assert clock.offset == pytest.approx(3.0 - 0.25, abs=1e-3)
    assert "has only 3 reductions of all ranks in common" in str(clock)


# --- Steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", [None, 1, 3, 4])
def test_compute_times_are_those_of_the_job(tmp_path: Path, quorum: int | None) -> None:
    compute = synthetic.even(100, 4, noise=0.2)
    written(tmp_path, compute=compute, quorum=quorum, hosts=TWO_HOSTS)
    steps = steps_of(tmp_path)
    assert (steps.policy, steps.rounds) == (("full", False) if quorum is None else (f"quorum:{quorum}", True))
    for rank in steps.ranks:
        assert rank.step.tolist() == list(range(1, 100))
        assert rank.compute == pytest.approx(compute[1:, rank.rank], abs=1e-5)
        assert rank.wait.min() > -2e-6  # recorded times are rounded
        assert rank.wait + rank.reduce == pytest.approx(rank.result - rank.handed)
        assert (rank.begin[1:] >= rank.result[:-1] - 1e-6).all()


@pytest.mark.parametrize(("nbytes", "rounds"), [(8, False), (100_000_000, True)])
def test_what_carries_the_training_is_told_by_bytes(tmp_path: Path, nbytes: int, rounds: bool) -> None:
    path = written(tmp_path, compute=synthetic.even(50, 2), quorum=None)
    for file in path.iterdir():
        moments = [1_000_000 * k for k in range(5)]
        bucket = {"table": "buckets", "bucket": [0], "name": ["loss"], "policy": ["solo"], "process_set": [0]}
        times = {"begin": [-1, *moments[1:]], "handed": moments, "result": moments}
        rest = {name: [0] * 5 for name in ("bucket", "blocked", "reduced", "late", "staleness")}
        steps = {"table": "steps", "step": [*range(5)], "round": [*range(5)], "bytes": [nbytes] * 5, **times, **rest}
        lines = [bucket | {"bytes": [nbytes]}, steps]
        file.write_text(file.read_text() + "".join(json.dumps(line) + "\n" for line in lines))
    found = steps_of(tmp_path)
    assert (found.policy, found.rounds) == (("solo", True) if rounds else ("full", False))
    assert {len(rank.step) for rank in found.ranks} == {4 if rounds else 49}


def test_under_full_the_others_wait_for_the_slowest(tmp_path: Path) -> None:
    compute = np.full((50, 4), 0.1)
    compute[:, 2] = 0.16
    written(tmp_path, compute=compute, quorum=None, reduce=0.01)
    for rank in steps_of(tmp_path).ranks:
        assert np.median(rank.wait) == pytest.approx(0.0 if rank.rank == 2 else 0.06, abs=1e-3)
        assert np.median(rank.reduce) == pytest.approx(0.01, abs=1e-3)
        assert not rank.late.any()


def test_a_slow_rank_is_late_under_a_quorum(tmp_path: Path) -> None:
    compute = np.full((60, 4), 0.1) + 1e-4 * np.arange(4)
    compute[:, 3] = 0.35
    written(tmp_path, compute=compute, quorum=3)
    ranks = steps_of(tmp_path).ranks
    slow = ranks[3].take(ranks[3].result < ranks[0].result[-1])  # later it is alone
    assert [rank.late.any() for rank in ranks[:3]] == [False] * 3
    assert slow.late.all()
    assert np.median(slow.staleness) in (2, 3)
    assert slow.wait.max() < 0.01


def test_common_steps_have_one_shape(tmp_path: Path) -> None:
    path = written(tmp_path, segments=5)
    (path / "rank-1.0.jsonl").unlink()
    common = steps_of(tmp_path).common()
    assert len({tuple(rank.step.tolist()) for rank in common.ranks}) == 1
    assert len(common.ranks[0].step) > 10


def test_one_step_tells_nothing(tmp_path: Path) -> None:
    written(tmp_path, compute=synthetic.even(1, 4))
    with pytest.raises(ValueError, match="no rank with two whole steps"):
        steps_of(tmp_path)


# --- Waits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits", "share"),
    [
        ([], 0.0),
        # For the gradients, of which Horovod's cycle had seen the last when they were handed over.
        ([(0.5, 1.001)], 0.0),
        ([(0.4, 0.45), (0.4501, 1.001)], 0.0),  # for one gradient after the other, as cycles see them in parts
        ([(0.3, 0.4), (0.5, 1.001)], 1.0),  # for another operation, then it worked on
    ],
)
def test_waits_for_more_than_gradients_are_told_from_those(
    tmp_path: Path, waits: list[tuple[float, float]], share: float
) -> None:
    read = recording.load(written(tmp_path, quorum=None))
    clocks = Clocks.fit(read)
    rank, steps = read.ranks[0], JobSteps.of(read, clocks).ranks[0]
    zero = clocks.seconds(rank, np.array([0]))[0]
    # Parts of the way from a step's begin to its result. The last tensors were handed over at 0.6.
    length = steps.result - steps.begin
    handed = 0.6
    computed = handed - sum(min(end, handed) - begin for begin, end in waits)
    steps = replace(steps, handed=steps.begin + handed * length, compute=computed * length)
    begin = 1e6 * (steps.begin[:, None] + length[:, None] * [begin for begin, _ in waits] - zero)
    table = {"begin": begin.ravel().astype(int)}
    rank = replace(rank, tables={**rank.tables, "waits": table})
    assert other_waits(rank, steps, clocks, rounds=False).mean() == share


@pytest.mark.parametrize(
    ("ready", "starved"),
    [
        (1.0, 0.8),  # the only thread that computes
        (3.0, 0.8),  # each of three threads
        (0.2, 0.16),  # a thread that sleeps for most of the time, and waits for 0.16 of it
    ],
)
@pytest.mark.parametrize("segments", [1, 3])
def test_a_rank_is_starved_in_its_steps(tmp_path: Path, ready: float, starved: float, segments: int) -> None:
    host = Host("worker-0", ready=ready, starved=0.8, starved_before=0.0)
    synthetic.write(tmp_path, Job(synthetic.even(40, 2), hosts=[host], segments=segments))
    for rank in recording.load(tmp_path).ranks.values():
        assert rank.starved == pytest.approx(starved, abs=0.001)
        unknown = {**rank.tables, "processor": {name: column[:0] for name, column in rank.tables["processor"].items()}}
        assert replace(rank, tables=unknown).starved == 0.0
