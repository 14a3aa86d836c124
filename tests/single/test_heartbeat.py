"""Signs of life: what is asked of whom before they begin, with the other ranks' answers in place of theirs."""

import json
import os
import socket
from collections.abc import Callable

import pytest
from interpreter import run_apart

import horovod_partial.torch  # noqa: F401 (loads Horovod, which the extension needs)
from horovod_partial.runtime import heartbeat
from horovod_partial.settings import settings


@pytest.fixture(autouse=True)
def five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings(), "abort_seconds", 5.0)
    monkeypatch.setattr(settings(), "stall_seconds", 60.0)
    monkeypatch.delenv("HOROVOD_STALL_CHECK_DISABLE", raising=False)


def answers(*rounds: dict[int, str]) -> Callable[[str], list[str]]:
    """A gather among two ranks, in which one says this in turn."""
    left = list(rounds)

    def gather(text: str) -> list[str]:
        other = left.pop(0)
        return [other.get(rank, text) for rank in range(2)]

    return gather


def closed_endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"{free.getsockname()[1]} {'0' * 32} 127.0.0.1"


def offer(endpoint: str, stall_seconds: float = 60.0) -> str:
    return json.dumps([endpoint, stall_seconds])


ELSEWHERE = json.dumps(["another place", 1])


def test_nothing_is_asked_where_it_is_off_or_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heartbeat.begin(0, 1, answers()) is None
    monkeypatch.setattr(settings(), "abort_seconds", 0.0)
    monkeypatch.setattr(settings(), "stall_seconds", 0.0)
    assert heartbeat.begin(0, 2, answers()) is None


@pytest.mark.parametrize(("value", "seconds"), [("1", 0.0), (" 1x", 0.0), ("0", 60.0), ("", 60.0), ("yes", 60.0)])
def test_stalls_go_with_horovods_own_check(monkeypatch: pytest.MonkeyPatch, value: str, seconds: float) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", value)
    assert heartbeat._stall_seconds() == seconds


def test_nobody_listens_where_rank_0_has_the_check_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings(), "abort_seconds", 0.0)
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    assert heartbeat.begin(0, 2, answers({1: ""}, {1: ""})) is None
    monkeypatch.delenv("HOROVOD_STALL_CHECK_DISABLE")
    assert heartbeat.begin(1, 2, answers({0: offer("", 0.0)}, {0: ""})) is None


@pytest.mark.parametrize("abort_seconds", [0.0, 5.0])
def test_two_ranks_find_each_other(monkeypatch: pytest.MonkeyPatch, abort_seconds: float) -> None:
    monkeypatch.setattr(settings(), "abort_seconds", abort_seconds)
    places = [{1: ELSEWHERE}] if abort_seconds else []
    center = heartbeat.begin(0, 2, answers(*places, {1: ""}, {1: ""}))
    assert center is not None
    assert heartbeat.begin(1, 2, answers(*places, {0: offer(center.endpoint)}, {0: ""})) is not None


def test_a_job_goes_on_where_ranks_cannot_reach_rank_0_and_none_is_to_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings(), "abort_seconds", 0.0)
    assert heartbeat.begin(1, 2, answers({0: offer(closed_endpoint())}, {0: ""})) is None
    assert heartbeat.begin(0, 2, answers({1: ""}, {1: "no way"})) is None
    text = "long waits will not be explained: rank 1: no way. Let them reach rank 0's host"
    assert capfd.readouterr().err.count(text) == 1


def test_the_stacks_of_all_threads_can_be_taken_in_a_process_without_standard_error() -> None:
    """Whatever programs have put in its place."""
    program = (
        "import sys, io; sys.stderr = io.StringIO(); import horovod_partial.torch\n"
        "from horovod_partial import _attach\nfrom horovod_partial.runtime import heartbeat\n"
        "def here():\n"
        "    heartbeat._prepare_stacks(); heartbeat._prepare_stacks()\n"
        "    print(_attach.take_stacks())\n"
        "here()\n"
        "import faulthandler; faulthandler.unregister(_attach.prepare_stacks()[0])\n"
        "print(repr(_attach.take_stacks()))\n"
    )
    done = run_apart(program)
    assert "in here" in done.stdout
    assert done.stdout.endswith("''\n")  # the signal is not sent where it would end the process


def test_a_rank_that_cannot_reach_rank_0_says_so_on_all() -> None:
    with pytest.raises(ValueError, match=r"rank 1: rank 0 does not answer on port \d+ of 127\.0\.0\.1\. Let them"):
        heartbeat.begin(1, 2, answers({0: ELSEWHERE}, {0: offer(closed_endpoint())}, {0: ""}))
    with pytest.raises(ValueError, match="rank 1: no way"):
        heartbeat.begin(0, 2, answers({1: ELSEWHERE}, {1: ""}, {1: "no way"}))


def test_neighbours_are_the_processes_that_this_one_sees() -> None:
    said: list[str] = []

    def gather(text: str) -> list[str]:
        said.append(text)
        return [text]

    assert heartbeat._neighbours(0, gather) == {}  # itself is none
    place, number = json.loads(said[0])
    assert number == os.getpid()
    assert heartbeat._neighbours(0, answers({1: json.dumps([place, 4711])})) == {1: 4711}
    assert heartbeat._neighbours(0, answers({1: ELSEWHERE})) == {}
