"""What every rank runs: pytest over the same tests, in step with the other ranks.

    horovodrun ... python rank.py FOLDER

FOLDER holds `plan.json`; every rank writes `rank.<n>.pid`, `rank.<n>.events` (a JSON object for each line) and, on
SIGUSR1, `rank.<n>.dump` there.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.compiler import leave_out_the_compiler


def rank_of_environment() -> int:
    """This process's rank, as the launcher says; Horovod is not initialised yet."""
    return int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def register(folder: Path, rank: int) -> None:
    """Be known to the process that has started this job, and ready to be asked for stacks."""
    dump = (folder / f"rank.{rank}.dump").open("w")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, dump, all_threads=True)
    pid = folder / f"rank.{rank}.pid"
    pid.with_suffix(".new").write_text(str(os.getpid()))
    pid.with_suffix(".new").rename(pid)
    end_with_the_tests()


def end_with_the_tests() -> None:
    """Let no rank outlive a pytest that was killed."""
    parent = int(os.environ["PARTIAL_TEST_PARENT"])

    def watch() -> None:
        while Path(f"/proc/{parent}").exists():
            time.sleep(2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def let_no_time_count() -> None:
    """Let no round close because of the time that passes: no wait counts, and a policy has a grace only if it says so."""
    from horovod_partial import _attach
    from horovod_partial.policies import GroupAverage, Majority, Quorum, Solo

    _attach.set_thresholds(waiting_seconds=1e4, parked_seconds=1e4)
    for policy in (Solo, Majority, Quorum, GroupAverage):
        policy.__init__.__kwdefaults__["grace_ms"] = 0


class Reporter:
    """A pytest plugin: writes what happens to each test into the rank's file of events."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", buffering=1)

    def write(self, test: str, outcome: str, text: str = "") -> None:
        self._file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = report.longreprtext
            if report.outcome == "skipped":
                text = report.longrepr[2] if isinstance(report.longrepr, tuple) else text
            if report.outcome == "failed":
                text += "".join(f"\n--- {title} ---\n{content}" for title, content in report.sections)
            self.write(report.nodeid, report.outcome, text)


def main() -> int:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())
    rank = rank_of_environment()
    register(folder, rank)
    os.chdir(plan["root"])

    if plan["setup"]["ranks"] > 2:  # tests that compile have two ranks
        leave_out_the_compiler()
    import torch

    from harness import world

    torch.set_num_threads(1)
    world.connect(plan, rank)
    framework = importlib.import_module(f"horovod_partial.{plan['setup']['framework']}")
    if "PARTIAL_TEST_STEADY" in os.environ:
        let_no_time_count()
    framework.init()
    reporter = Reporter(folder / f"rank.{rank}.events")
    world.reporter = reporter
    options = ["--rootdir", plan["root"], "--runxfail", "--capture=sys", "-qq", "--no-summary", "--tb=short"]
    options += ["-o", "timeout=0", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:hypothesispytest"]
    return int(pytest.main([*options, *plan["arguments"]], plugins=[reporter]))


if __name__ == "__main__":
    sys.exit(main())
