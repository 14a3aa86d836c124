"""Lets one rank of four sleep and one be stopped, again and again, and says how soon that was explained.

    .venv/bin/python tests/faults/stalls.py --transport gloo --policy majority --tries 20

A try is good when within the time set, from when both are missing, the log names both and says which is which, and the stacks
of the sleeper and of those that wait are there.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))

from harness.matrix import Setup
from harness.stalls import explains
from harness.whole_jobs import Job

RANKS, WAITING, SLEEPER, STOPPED = 4, (0, 1), 2, 3


def attempt(transport: str, policy: str, seconds: float) -> float:
    """Seconds from when the last of all ranks has come to where it waits, sleeps or stops, until all is written."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Setup(transport, RANKS), Path(folder))
        try:
            job.start("stall", policy, "stopped", str(RANKS), HOROVOD_PARTIAL_STALL_SECONDS=str(seconds))
            job.wait_for_notes("missing", 2)
            job.wait_for_notes("goes-on", len(WAITING))
            since = time.monotonic()
            job.until(
                lambda: explains(job.output(), sleeper=SLEEPER, stopped=STOPPED, waiting=WAITING), "all is explained"
            )
            return time.monotonic() - since
        finally:
            job.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=["gloo", "mpi"], required=True)
    parser.add_argument("--policy", default="majority")
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0, help="the time set")
    arguments = parser.parse_args()
    took = []
    for number in range(arguments.tries):
        took.append(attempt(arguments.transport, arguments.policy, arguments.seconds))
        print(f"{number + 1}: {took[-1]:.2f} s", flush=True)
    good = sum(one <= arguments.seconds for one in took)
    print(f"{good} of {len(took)} within {arguments.seconds:g} s; {min(took):.2f} to {max(took):.2f} s")
    return 0 if good == len(took) else 1


if __name__ == "__main__":
    sys.exit(main())
