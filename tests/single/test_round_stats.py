"""Statistics: from the counts of the core to something to read."""

from typing import Any

import pytest

from horovod_partial.runtime.round_stats import Progress, slowness_now, summarise


def raw(**changes: Any) -> dict[str, Any]:
    return {
        "rounds": 4,
        "closed_by": {"first": 1, "everybody": 1, "quorum": 2, "liveness": 0, "flush": 0, "end": 0},
        "on_time": [4, 2],
        "late": [0, 2],
        "gradients": [4, 5],
        "fresh": [0, 2, 2],
        "staleness": {1: 2, 0: 5},
        "waited_seconds": 0.5,
        "dropped": 1,
        "summed": 3,
        "healed": 2,
        "bytes_held": 64,
        "pending": True,
        "missed_rounds": 2,
        "groups_made": 3,
        "setup_seconds": 0.25,
    } | changes


def test_summary() -> None:
    summary = summarise({"b": raw(), "a": raw(arrival_offset_seconds=[0.0, 0.25], unconnected_windows=2)})
    assert list(summary) == ["a", "b"]
    bucket = summary["b"]
    assert bucket["closed_by"] == {"first": 1, "everybody": 1, "quorum": 2}
    assert (bucket["on_time"], bucket["late"], bucket["gradients"]) == ([4, 2], [0, 2], [4, 5])
    assert bucket["fresh_mean"] == pytest.approx(1.5)
    assert bucket["fresh_histogram"] == {1: 2, 2: 2}
    assert list(bucket["staleness_histogram"].items()) == [(0, 5), (1, 2)]
    assert (bucket["waited_seconds"], bucket["dropped"], bucket["summed"], bucket["bytes_held"]) == (0.5, 1, 3, 64)
    assert (bucket["pending"], bucket["missed_rounds"]) == (True, 2)
    assert (bucket["groups_made"], bucket["setup_seconds"]) == (3, 0.25)
    assert "arrival_offset_seconds" not in bucket
    assert "unconnected_windows" not in bucket
    assert summary["a"]["arrival_offset_seconds"] == [0.0, 0.25]
    assert summary["a"]["unconnected_windows"] == 2


def test_no_round_yet() -> None:
    summary = summarise({"a": raw(rounds=0, fresh=[], staleness={}, on_time=[], late=[])})
    assert summary["a"]["fresh_mean"] == 0.0
    assert summary["a"]["fresh_histogram"] == {}


def test_nothing() -> None:
    assert summarise({}) == {}


def test_logs_tell_how_many_ranks_are_slow() -> None:
    assert slowness_now([]) == {}, "ranks are not watched"
    ranks = [{"slowness": factor} for factor in (1.0, 2.5, 1.2)]
    assert slowness_now(ranks) == {"slow_ranks": 2, "slowness": 2.5}
    assert slowness_now(ranks[:1]) == {"slow_ranks": 0, "slowness": 1.0}


def test_progress_with_a_bucket_that_has_had_no_round() -> None:
    none = raw(rounds=0, on_time=[], late=[], fresh=[], staleness={}, waited_seconds=0.0)
    more = {"rounds": 6, "on_time": [6, 3], "late": [0, 3], "fresh": [0, 3, 3], "staleness": {0: 8, 1: 3}}
    counts = iter([{"a": none}, {"a": none}, {"a": raw(), "b": none}, {"a": raw(**more, waited_seconds=0.75)}])
    progress = Progress(lambda: next(counts), rank=1)
    assert progress.since() == {}
    assert progress.since() == {"late": 0.5, "fresh": 1.5, "staleness": pytest.approx(2 / 7), "waited_seconds": 0.5}
    assert progress.since() == {"late": 0.5, "fresh": 1.5, "staleness": 0.25, "waited_seconds": 0.25}
