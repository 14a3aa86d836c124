"""Signs of life: what is asked of whom before they begin, with the other ranks' answers in place of theirs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

import pytest

import horovod_partial.torch  # noqa: F401 (loads Horovod, which the extension needs)
from horovod_partial import heartbeat
from horovod_partial.settings import settings


@pytest.fixture(autouse=True)
def five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings(), "abort_seconds", 5.0)


def answers(*rounds: dict[int, str]) -> Callable[[str], list[str]]:
    """A gather among two ranks, in which one says this in turn."""
    left = list(rounds)

    def gather(text: str) -> list[str]:
        other = left.pop(0)
        return [other.get(rank, text) for rank in range(2)]

    return gather


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


ELSEWHERE = json.dumps(["another place", 1])


def test_nothing_is_asked_where_it_is_off_or_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heartbeat.begin(0, 1, answers()) is None
    monkeypatch.setattr(settings(), "abort_seconds", 0.0)
    assert heartbeat.begin(0, 2, answers()) is None


def test_two_ranks_find_each_other() -> None:
    center = heartbeat.begin(0, 2, answers({1: ELSEWHERE}, {1: ""}, {1: ""}))
    assert center is not None
    assert heartbeat.begin(1, 2, answers({0: ELSEWHERE}, {0: center.endpoint}, {0: ""})) is not None


def test_a_rank_that_cannot_reach_rank_0_says_so_on_all() -> None:
    endpoint = f"{closed_port()} {'0' * 32} 127.0.0.1"
    with pytest.raises(ValueError, match=r"rank 1: rank 0 does not answer on port \d+ of 127\.0\.0\.1\. Let them"):
        heartbeat.begin(1, 2, answers({0: ELSEWHERE}, {0: endpoint}, {0: ""}))
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
