"""What happened to the rounds, in a form to read and to plot."""

from __future__ import annotations

from typing import Any


def summarise(raw: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Statistics by bucket, from the counts that the core keeps.

    Returns:
        For each bucket: `rounds`; `closed_by` (reason to rounds); `on_time` and `late` (lists, by rank: rounds with and
        without that rank's fresh contribution); `fresh_mean` and `fresh_histogram` (number of fresh contributors to
        rounds); `staleness_histogram` (rounds since a rank's contribution before, 0 if there was one in the previous
        round, to contributions); `waited_seconds` (by this rank, for results); `dropped` (late contributions
        of this rank that were not finite); `summed` (missed results of this rank that had to be added to others, because it
        was blocked for longer than `replay_limit` rounds: its model may differ from then on); `bytes_held` (buffers for what is pending and missed);
        `pending` (this rank has late contributions that no round has delivered); `missed_rounds` (whose results this rank
        has not taken);
        `groups_made` and `setup_seconds` (communicators that this rank has made for groups, and what that took: it is no
        part of later rounds); and on rank 0 `arrival_offset_seconds` (list, by rank: mean time behind the first rank to
        arrive) and, with `PartialReduce`, `unconnected_windows` (how often the last groups did not connect all ranks).
    """
    return {name: _summarise_bucket(bucket) for name, bucket in sorted(raw.items())}


def _summarise_bucket(raw: dict[str, Any]) -> dict[str, Any]:
    fresh = {count: rounds for count, rounds in enumerate(raw["fresh"]) if rounds}
    rounds = raw["rounds"]
    summary = {
        "rounds": rounds,
        "closed_by": {reason: count for reason, count in raw["closed_by"].items() if count},
        "on_time": list(raw["on_time"]),
        "late": list(raw["late"]),
        "fresh_mean": sum(count * n for count, n in fresh.items()) / rounds if rounds else 0.0,
        "fresh_histogram": fresh,
        "staleness_histogram": dict(sorted(raw["staleness"].items())),
        "waited_seconds": raw["waited_seconds"],
        "dropped": raw["dropped"],
        "summed": raw["summed"],
        "bytes_held": raw["bytes_held"],
        "pending": raw["pending"],
        "missed_rounds": raw["missed_rounds"],
        "groups_made": raw["groups_made"],
        "setup_seconds": raw["setup_seconds"],
    }
    for key in ("arrival_offset_seconds", "unconnected_windows"):
        if key in raw:
            summary[key] = raw[key]
    return summary
