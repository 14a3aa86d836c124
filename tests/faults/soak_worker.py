"""One rank of a soak: `soak_worker.py FOLDER`. It goes through windows of load until it is told to stop, see `soak.py`.

What a window is follows from its number alone, so that all ranks do the same.
"""

import gc
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness.compiler import leave_out_the_compiler
from harness.rank import rank_of_environment, register
from history import Writer
from loads import LOADS, MODELS, QUORUM, Scene
from stops import stop_for

import horovod_partial.torch as hvd

FOLDER = Path(sys.argv[1])
RANKS, SEED, FIRST_WINDOW = json.loads((FOLDER / "soak.json").read_text())
RANK = rank_of_environment()
STEPS = 60
SCENES = [("operations", policy) for policy in QUORUM] + [("optimizer", policy) for policy in QUORUM]
SCENES += [("models", policy) for policy in MODELS] + [("sharing", "work_sharing")]


def measure(window: int) -> None:
    """Append what this process uses, after the window."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    line = {
        "window": window,
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
    with (FOLDER / f"use.{RANK}").open("a") as file:
        file.write(json.dumps(line) + "\n")


def run_window(window: int, process_sets: list[Any]) -> None:
    """One load of one policy, on all ranks or in two process sets side by side."""
    rng = random.Random(f"{SEED} {window}")  # the same on all ranks
    own = random.Random(f"{SEED} {window} {RANK}")
    load_name, policy = SCENES[window % len(SCENES)]
    chosen = rng.choice((hvd.global_process_set, None))
    process_set = chosen or next(of for of in process_sets if of.included())
    folder = FOLDER / f"window.{window}.{process_set.process_set_id}"
    folder.mkdir(exist_ok=True)
    history = Writer(folder, process_set.rank())
    history.write("begin", rank=process_set.rank(), size=process_set.size(), seed=SEED)
    scene = Scene(
        history,
        process_set.rank(),
        process_set.size(),
        policy,
        rng.randint(1, 4),
        f"{SEED} {window} {RANK}",
        passes=rng.randint(1, 4) if load_name == "sharing" else 1,
        process_set=process_set,
    )
    load = LOADS[load_name](scene)
    slow, pace = own.random() < 0.3, rng.uniform(0.5, 4.0)
    stops = own.randrange(STEPS) if own.random() < 0.05 else None
    # A rank of an optimizer that waits there while others train adds up what it has no room for, and its model parts. With
    # shared updates it would hold a micro-batch that the others wait for.
    beside = rng.randrange(STEPS) if load_name in ("operations", "models") or policy == "full" else None
    for step in range(STEPS):
        time.sleep(own.uniform(0, pace * (4 if slow else 1)) / 1e3)
        if step == stops:
            stop_for(own.uniform(0.1, 0.5))
        load.step(step)
        if step == beside:
            with history.waiting("collective"):
                hvd.allreduce(torch.ones(100), name="beside", process_set=process_set)
    load.flush()
    load.tell_closings()
    history.write("end")
    history.close()


def main() -> None:
    leave_out_the_compiler()
    register(FOLDER, RANK)
    torch.set_num_threads(1)
    halves = [hvd.ProcessSet(range(start, RANKS, 2)) for start in range(2)]
    hvd.init(process_sets=halves)
    window = FIRST_WINDOW
    while not hvd.broadcast_object((FOLDER / "stop").exists() if RANK == 0 else None, root_rank=0, name="goes on"):
        run_window(window, halves)
        measure(window)
        window += 1
    hvd.shutdown()


if __name__ == "__main__":
    main()
