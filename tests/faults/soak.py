"""Many rounds of every policy in one job, for as long as one likes, judged window by window.

    .venv/bin/python tests/faults/soak.py --transport mpi --minutes 60 [--results FILE]

A window is one load under one policy, on all ranks or in two process sets side by side, with random delays, stops and a
collective of Horovod's own beside it (`soak_worker.py`). The checker reads the histories of each window when it is over. At
the end memory, open files and threads of each rank must not have grown in the last half. With a file of results, to which a
line is added, the next run goes on with the windows behind those that are in it.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checker
from history import Event, read
from jobs import TRANSPORTS, Results, Setup, start

GROWTH = 0.01  # of memory, from the third quarter of a soak to the last
WARM_WINDOWS = 56  # four times each load with each policy; in less there is no half without a first time
END_SECONDS = 120.0  # for the last window, and the end
STANDSTILL_SECONDS = 180.0  # from a window's end to the next


class Soak:
    """A running soak."""

    def __init__(self, transport: str, ranks: int, seed: int, first_window: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"soak-{transport}-"))
        self.next_window = first_window
        self.rounds = 0
        self.problems: list[str] = []
        self._ranks = ranks
        (self.folder / "soak.json").write_text(json.dumps([ranks, seed, first_window]))
        self._job = start("soak_worker.py", Setup(transport, ranks), self.folder)

    def run(self, seconds: float) -> None:
        """Let it go on for so long after its first window, or until something is wrong; then end it."""
        end = math.inf
        moved = time.monotonic()
        try:
            while not self.problems:
                before = self.next_window
                self._judge_windows()
                now = time.monotonic()
                if self.next_window > before:
                    moved = now
                    end = min(end, now + seconds)
                if now > end:
                    (self.folder / "stop").touch()
                if self._job.popen.poll() is not None and not self._job.left():
                    break
                if now > min(end + END_SECONDS, moved + STANDSTILL_SECONDS):
                    self.problems.append(f"hangs in window {self.next_window}\n{self._job.dump()}")
                time.sleep(0.1)
        finally:
            status = self._job.popen.poll()
            self._job.kill()
        self._judge_windows()
        if status != 0 and not self.problems:
            self.problems.append(f"the job ended with status {status}\n{self._job.tail()}")
        if not self.problems:
            self.problems += grown(self._uses())

    def _judge_windows(self) -> None:
        """Check the windows that all ranks have ended, and forget them."""
        while not self.problems:
            folders = list(self.folder.glob(f"window.{self.next_window}.*"))
            histories = {folder: read(folder) for folder in folders}
            ended = sum(
                bool(events) and events[-1]["e"] == "end" for of in histories.values() for events in of.values()
            )
            if ended < self._ranks:
                return
            for folder, of in histories.items():
                found = checker.check(of)
                self.problems += [f"window {self.next_window}, {folder}: {violation}" for violation in found]
                self.rounds += rounds_in(of)
                if not found:
                    shutil.rmtree(folder)
            self.next_window += 1

    def _uses(self) -> dict[int, list[dict[str, Any]]]:
        files = self.folder.glob("use.*")
        return {int(file.suffix[1:]): [json.loads(line) for line in file.read_text().splitlines()] for file in files}

    def growth(self) -> float:
        """The most that the memory of a rank has grown by, from the third quarter to the last."""
        return max((ratio - 1 for ratio in ratios(self._uses(), "resident")), default=0.0)


def rounds_in(histories: dict[int, list[Event]]) -> int:
    """How many rounds of all buckets are told of."""
    rounds: dict[str, set[int]] = defaultdict(set)
    for events in histories.values():
        for event in events:
            if event["e"] == "result" and event["round"] is not None:
                rounds[event["b"]].add(event["round"])
    return sum(map(len, rounds.values()))


def ratios(uses: dict[int, list[dict[str, Any]]], what: str) -> Iterator[float]:
    """Of each rank, what it used on average in the last quarter to that in the third; none in a short soak."""
    for of_rank in uses.values():
        quarter = len(of_rank) // 4
        if len(of_rank) >= WARM_WINDOWS:
            third, last = of_rank[2 * quarter : 3 * quarter], of_rank[3 * quarter :]
            yield statistics.fmean(use[what] for use in last) / statistics.fmean(use[what] for use in third)


def grown(uses: dict[int, list[dict[str, Any]]]) -> list[str]:
    """What has grown."""
    return [
        f"{what} have grown to {max(found):.3f} times from the third quarter to the last"
        for what in ("resident", "files", "threads")
        if (found := list(ratios(uses, what))) and max(found) > 1 + GROWTH
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=TRANSPORTS, default="mpi")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file to which a line is added")
    options = parser.parse_args()
    results = Results(options.results)
    key = {"transport": options.transport, "seed": options.seed}
    own = [line for line in results.read() if key.items() <= line.items()]
    first = max((line["windows"][1] for line in own), default=0)
    soak = Soak(options.transport, options.ranks, options.seed, first)
    began = time.monotonic()
    soak.run(60 * options.minutes)
    result = {
        **key,
        "ranks": options.ranks,
        "windows": [first, soak.next_window],
        "minutes": round((time.monotonic() - began) / 60, 2),
        "rounds": soak.rounds,
        "memory_growth": round(soak.growth(), 5),
        "problems": soak.problems,
        "folder": str(soak.folder) if soak.problems else None,
    }
    results.add(result)
    if not soak.problems:
        shutil.rmtree(soak.folder)
    return bool(soak.problems)


if __name__ == "__main__":
    sys.exit(main())
