"""A model of work sharing on GPUs: when may a host queue the next micro-batch? In simulated time; it needs no GPU and no ranks.

    .venv/bin/python benchmarks/run_ahead.py [--json FILE]

Of 4 ranks one has a device that is 3 times slower. An update has 4 micro-batches for each rank. A host needs some time to
queue a micro-batch. Its device begins when the first kernel is queued at once, or only with the last one, because the host
loads the data first. The coordinator decides in each cycle, of 1 or 2 ms, by what docs/protocol.md, rule 17, says: it knows
the pace of each rank, gives what is free to the rank that would end it first, and takes back what has not begun.

A figure is the time of the best schedule of whole micro-batches over that of an update, in the mean over updates that begin
at different moments of a cycle. The first updates, in which the coordinator learns the paces, do not count. The best schedule
knows all times beforehand, and its devices idle only until the first kernel of the update. The rules are

    host, two     a micro-batch has ended when it is queued, and the host may queue two behind the one in progress
    host, all     the same without this limit
    event         a micro-batch has ended by the event behind it, and the next one is queued then
    event, cycle  the same, but the host looks for the event in each cycle: it knows half a cycle too late in the mean
    ahead, cycle  the same, but one micro-batch may be queued behind the one in progress
    after first   the same, but none behind the first one of the update: hvd.WorkSharing()
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import harness

TICK = 50  # all times are whole numbers of microseconds, and multiples of this
RANKS, EACH, SLOW = 4, 4, 3
LEARNING, MEASURED = 8, 20  # updates
MICRO_MS = (5, 20)
HOST_MS = (0.5, 1.0, 2.0, 3.0)
CYCLE_MS = (1, 2)
LEADS = {"first kernel": 0, "last kernel": 1}  # the part of the time to queue after which the device begins


class Rule(NamedTuple):
    ahead: int  # how many micro-batches the host may queue behind the one in progress
    by_event: bool = True  # whether a micro-batch has ended by its event; otherwise when it is queued
    first_alone: bool = False  # whether the first micro-batch of an update has to end before the second is queued
    in_cycles: bool = False  # whether the host looks for an event in each cycle only


RULES = {
    "host, two": Rule(2, by_event=False),
    "host, all": Rule(RANKS * EACH, by_event=False),
    "event": Rule(0),
    "event, cycle": Rule(0, in_cycles=True),
    "ahead, cycle": Rule(1, in_cycles=True),
    "after first": Rule(1, in_cycles=True, first_alone=True),
}


@dataclass
class Rank:
    device: int  # the time of a micro-batch on the device
    host: int  # the time in which the host queues one
    lead: int  # the part of it before the first kernel
    looks: int  # how much later than an event the host knows of it
    rule: Rule
    pace: int = 0  # what the coordinator takes the time of a micro-batch to be
    held: int = EACH
    begins: list[int] = field(default_factory=list)  # when the host began to queue each micro-batch of the update
    device_ends: list[int] = field(default_factory=list)
    reported: tuple[int, int] = (0, 0)  # how many had ended at the last report, and how long they took

    def ends(self) -> list[int]:
        """When each micro-batch has ended, as far as the rank tells."""
        if self.rule.by_event:
            return [end + self.looks for end in self.device_ends]
        return [begin + self.host for begin in self.begins]

    def done(self, now: int) -> int:
        return sum(end <= now for end in self.ends())

    def run(self, now: int) -> None:
        """Queue a micro-batch, if the rank may."""
        ended = sum(end + self.looks <= now for end in self.device_ends)
        begun = len(self.begins)
        if begun == self.held or (begun and now < self.begins[-1] + self.host) or begun - ended > self.rule.ahead:
            return
        if self.rule.first_alone and begun and not ended:
            return
        start = max(now + self.lead, self.device_ends[-1] if begun else 0)
        self.begins.append(now)
        self.device_ends.append(max(start + self.device, now + self.host))

    def report(self, now: int) -> None:
        """Let the coordinator learn how long a micro-batch takes."""
        done, ends = self.done(now), self.ends()
        spans = [ends[i] - max(self.begins[i], ends[i - 1] if i else 0) for i in range(done)]
        more, took = done - self.reported[0], sum(spans) - self.reported[1]
        if more > 0:
            self.pace = took // more if self.pace == 0 else (self.pace + took // more) // 2
        self.reported = done, sum(spans)

    def free_at(self, now: int) -> int:
        """When the coordinator expects the rank to have ended what it has begun."""
        done = self.done(now)
        if done == self.held:
            return now
        since = max(self.ends()[done - 1] if done else 0, self.begins[done] if done < len(self.begins) else 0)
        due = since + (len(self.begins) - done) * self.pace
        return max(due, 2 * now - due)

    def begin_update(self) -> None:
        self.held, self.begins, self.device_ends, self.reported = EACH, [], [], (0, 0)


def decide(ranks: list[Rank], now: int, cycle: int) -> None:
    """Grant and take back, as `Ledger` of cpp/core/rounds/work_sharing.cc does in a cycle."""
    free = RANKS * EACH - sum(rank.held for rank in ranks)
    keeps = [max(len(rank.begins), 1) for rank in ranks]
    wanted = [rank.held for rank in ranks]
    ends = [rank.free_at(now) + (rank.held - len(rank.begins)) * rank.pace for rank in ranks]
    moving = free
    while True:
        arrives = now if moving > 0 else now + 2 * cycle
        one_more = [max(end, arrives) + rank.pace for rank, end in zip(ranks, ends, strict=True)]
        to = one_more.index(min(one_more))
        lasts = [i for i in range(RANKS) if wanted[i] > keeps[i]]
        last = max(lasts, key=lambda i: ends[i], default=to)
        if moving <= 0 and ends[last] <= one_more[to]:
            break
        ends[to] = one_more[to]
        wanted[to] += 1
        if moving <= 0:
            wanted[last] -= 1
            ends[last] -= ranks[last].pace
        moving -= 1
    for rank, number in zip(ranks, wanted, strict=True):
        granted = min(number - rank.held, free)  # what is taken back now is free in the next cycle
        rank.held += granted
        free -= max(granted, 0)


def update(ranks: list[Rank], start: int, cycle: int) -> int:
    """The time of an update that begins so long after a cycle."""
    now = start
    for rank in ranks:
        rank.begin_update()
    while True:
        if now % cycle == 0:
            for rank in ranks:
                rank.report(now)
            if all(rank.pace for rank in ranks):
                decide(ranks, now, cycle)
        for rank in ranks:
            rank.run(now)
        ended = max(max(rank.device_ends, default=0) for rank in ranks)
        if sum(len(rank.begins) for rank in ranks) == RANKS * EACH:
            for rank in ranks:
                rank.report(ended + cycle)
            return ended - start
        now += TICK


def best(devices: list[int], host: int, lead: int) -> int:
    """The time of the best schedule of whole micro-batches."""
    ends = [lead] * len(devices)
    for _ in range(len(devices) * EACH):
        one_more = [end + max(device, host) for end, device in zip(ends, devices, strict=True)]
        to = one_more.index(min(one_more))
        ends[to] = one_more[to]
    return max(ends)


def efficiency(rule: Rule, micro_ms: float, host_ms: float, lead: float, cycle_ms: float) -> float:
    """The time of the best schedule over that of an update."""
    devices = [round(1000 * micro_ms)] * (RANKS - 1) + [round(1000 * micro_ms * SLOW)]
    host, cycle = round(1000 * host_ms), round(1000 * cycle_ms)
    ahead = round(lead * host)
    ranks = [Rank(device, host, ahead, cycle // 2 if rule.in_cycles else 0, rule) for device in devices]
    times = [
        update(ranks, cycle * number // MEASURED // TICK * TICK % cycle, cycle) for number in range(LEARNING + MEASURED)
    ]
    return best(devices, host, ahead) * MEASURED / sum(times[LEARNING:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    figures = {
        f"{micro:g} ms, {begins}": {
            name: {
                f"{host:g}, {cycle:g}": efficiency(rule, micro, host, lead, cycle)
                for host in HOST_MS
                for cycle in CYCLE_MS
            }
            for name, rule in RULES.items()
        }
        for micro in MICRO_MS
        for begins, lead in LEADS.items()
    }
    harness.write_json(options.json, {"host_ms": HOST_MS, "cycle_ms": CYCLE_MS, "efficiency": figures})
    for setting, by_rule in figures.items():
        harness.print_table(
            f"Best schedule over this: micro-batches of {setting}",
            ["ms to queue, and of a cycle", *next(iter(by_rule.values()))],
            [[name, *(f"{value:.2f}" for value in row.values())] for name, row in by_rule.items()],
        )


if __name__ == "__main__":
    main()
