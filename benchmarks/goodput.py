"""Training time that faults cost an elastic job, under three policies.

    .venv/bin/python benchmarks/goodput.py [--json FILE] [--seconds 240]

Three ranks on one host of the launcher's, one on another; a step computes for 50 ms (a sleep), and 25 steps are a commit.
From the first step on, for so many seconds, the rank on the other host is left alone, or killed every two minutes, or
stopped for 5 s every minute. Who is killed comes back: Horovod tries its host again after 5 to 10 s.

Goodput is the share of the time that committed steps took, at the pace of the undisturbed job under the same policy. Of the
rest, a fault has cost its share: steps since the last commit, the time until the others notice, and two restarts, one
without the rank and one with it. The policies run one after another, so that none takes time from another.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness
import torch
from torch import nn

import horovod_partial.torch as hvd

POLICIES = ("full", "majority", "solo")
COMPUTE_MS, COMMIT_EVERY, STOP_SECONDS = 50, 25, 5.0
RANKS, HOSTS, VICTIM = 4, "localhost:3\n127.0.0.1:1\n", "127.0.0.1"
EVERY_SECONDS = {"none": math.inf, "kill": 120.0, "stop": 60.0}


def train(policy: str, seconds: float, folder: str) -> dict[str, float]:
    """On every rank of an elastic job: how many steps were committed in how many seconds."""
    here = Path(folder)
    (here / os.environ["HOROVOD_HOSTNAME"]).write_text(str(os.getpid()))
    model = nn.Linear(1000, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001), model.named_parameters(), sync=policy
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, steps=0, begin=time.time())

    @hvd.elastic.run
    def loop(state: Any) -> None:
        over = False
        while not over:
            for _ in range(COMMIT_EVERY):
                time.sleep(COMPUTE_MS / 1e3)
                optimizer.zero_grad()
                model(torch.randn(8, 1000)).square().mean().backward()
                optimizer.step()
            optimizer.flush()
            state.steps += COMMIT_EVERY
            (here / "begun").touch()
            over = hvd.broadcast_object(time.time() > state.begin + seconds, name="over")
            state.commit()

    loop(state)
    return {"steps": state.steps, "seconds": time.time() - state.begin}


def disturb(fault: str, seconds: float, folder: Path) -> None:
    """Let the fault happen, as often as it fits."""
    while not (folder / "begun").exists():
        time.sleep(0.1)
    begin = time.monotonic()
    for number in range(occasions(fault, seconds)):
        time.sleep(max(0.0, begin + (number + 0.5) * EVERY_SECONDS[fault] - time.monotonic()))
        victim = int((folder / VICTIM).read_text())
        if fault == "kill":
            os.kill(victim, signal.SIGKILL)
        else:
            os.kill(victim, signal.SIGSTOP)
            time.sleep(STOP_SECONDS)
            os.kill(victim, signal.SIGCONT)


def occasions(fault: str, seconds: float) -> int:
    """How often a fault happens in a job."""
    return int(seconds // EVERY_SECONDS[fault])


def run(policy: str, fault: str, seconds: float) -> dict[str, float]:
    """One job."""
    with tempfile.TemporaryDirectory(prefix="goodput-") as name:
        folder = Path(name)
        script = folder / "discover"
        script.write_text(f"#!/bin/sh\nprintf '{HOSTS}'\n")
        script.chmod(0o755)
        options = ["--network-interfaces", "lo", "--min-np", "1", "--max-np", str(RANKS)]
        options += ["--host-discovery-script", str(script), "--blacklist-cooldown-range", "5", "10"]
        threading.Thread(target=disturb, args=(fault, seconds, folder), daemon=True).start()
        arguments = {"policy": policy, "seconds": seconds, "folder": name}
        return harness.launch(train, ranks=RANKS, transport="gloo", options=options, **arguments)


def main() -> None:
    harness.origin()  # before anything is measured
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--seconds", type=float, default=240.0, help="of each job, from its first step on")
    options = parser.parse_args()
    figures: dict[str, Any] = {"seconds": options.seconds, "runs": {}}
    for fault in EVERY_SECONDS:
        figures["runs"][fault] = {policy: run(policy, fault, options.seconds) for policy in POLICIES}
    rows = []
    for fault in EVERY_SECONDS:
        count = occasions(fault, options.seconds)
        for policy in POLICIES:
            found, free = figures["runs"][fault][policy], figures["runs"]["none"][policy]
            found["goodput"] = found["steps"] / found["seconds"] * free["seconds"] / free["steps"]
            found["lost_seconds"] = (1 - found["goodput"]) * found["seconds"] / count if count else 0.0
            row = [fault, policy, f"{found['steps']:.0f}", f"{found['seconds']:.0f}", f"{found['goodput']:.1%}"]
            rows.append([*row, f"{found['lost_seconds']:.1f}" if count else ""])
    harness.print_table(
        f"An elastic job of {RANKS} ranks, one of which is killed every 2 minutes, or stopped for 5 s every minute",
        ["fault", "policy", "steps", "seconds", "goodput", "lost a fault in s"],
        rows,
    )
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
