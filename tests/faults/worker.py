"""One rank of a job with faults: `worker.py FOLDER`, where the job's plan is, and where the histories go.

It does its load, lets happen to itself what the plan says, and writes its history. It checks nothing.
"""

import contextlib
import ctypes
import json
import os
import queue
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness.compiler import leave_out_the_compiler
from harness.rank import rank_of_environment, register
from history import Writer
from loads import LOADS, BadBatchError, Scene
from plan import LINK, PLACES, Fault, Plan
from stops import stop_for

import horovod_partial.torch as hvd

FOLDER = Path(sys.argv[1])
PLAN = Plan.from_json(json.loads((FOLDER / "plan.json").read_text()))
RANK = rank_of_environment()
HISTORY = Writer(FOLDER, RANK)

SPARE_MEMORY = 4 << 20  # that is left to a rank which is to run out of it
BIG = 64 << 20  # bytes of the bucket for which it has no memory


class PlannedError(RuntimeError):
    """A planned failure."""


class Faults:
    """What the plan has for this rank."""

    def __init__(self) -> None:
        self._mine = [fault for fault in PLAN.faults if fault.rank == RANK]
        self._within = [fault for fault in self._mine if fault.moment in PLACES]  # that are still to come
        self._step = -1

    def within(self, place: str) -> None:
        """Let happen what the plan says, in this place of a step."""
        for fault in [fault for fault in self._within if fault.moment == place and self._step >= fault.step]:
            self._within.remove(fault)
            happen(fault)

    def at_start(self) -> None:
        for fault in self._mine:
            if fault.kind == "starts late":
                tell_fault(fault)
                time.sleep(fault.seconds)

    def before_step(self, number: int) -> None:
        self._step = number
        for fault in self._mine:
            if fault.step == number and fault.moment in ("step", "groups"):
                with contextlib.suppress(BadBatchError):
                    happen(fault)

    def before(self, moment: str) -> None:
        """A flush or the end begins."""
        for fault in self._mine:
            if fault.moment == moment and self._step >= fault.step:
                kill_soon(fault)


def tell_fault(fault: Fault) -> None:
    HISTORY.write("fault", kind=fault.kind, seconds=fault.seconds)


def kill_soon(fault: Fault) -> None:
    """Let a flush or an end begin, and kill this rank within it."""

    def kill() -> None:
        time.sleep(0.02)
        tell_fault(fault)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def happen(fault: Fault) -> None:
    """What comes before a step, or within it."""
    if fault.moment == "groups":
        kill_soon(fault)
    elif fault.kind in HAPPENINGS:
        tell_fault(fault)
        HAPPENINGS[fault.kind](fault)


def jump(fault: Fault) -> None:
    """The clock on the wall jumps a day, and back after a while."""
    clock = ctypes.CDLL(None)
    before = time.time()
    clock.double_jump(ctypes.c_long(86400))
    assert time.time() - before > 80000, "the double of the clock is not preloaded"
    threading.Timer(fault.seconds, lambda: clock.double_jump(ctypes.c_long(-86400))).start()


def fail_in_loader(_: Fault) -> None:
    """As a thread that prepares batches does: it hands its exception to the one that trains."""
    batches: queue.Queue[Exception] = queue.Queue()
    threading.Thread(target=lambda: batches.put(PlannedError("in the loader's thread"))).start()
    raise batches.get()


def fail(fault: Fault) -> None:
    raise PlannedError(fault.kind)


def fail_and_be_caught(_: Fault) -> None:
    """As in programs that skip a bad batch."""
    raise BadBatchError


def leave(_: Fault) -> None:
    HISTORY.write("leave")
    sys.exit(0)


def run_out_of_memory(_: Fault) -> None:
    tensor = big_tensor()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + SPARE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    arrive_at_the_big_bucket(tensor)


def big_tensor() -> torch.Tensor:
    return torch.ones(BIG // 8, dtype=torch.float64)


def arrive_at_the_big_bucket(tensor: torch.Tensor) -> None:
    """All others can bring to it what one rank cannot."""
    with HISTORY.waiting("round"):
        hvd.partial_allreduce_(tensor, name="big", op=hvd.Sum, sync="solo")


HAPPENINGS: dict[str, Callable[[Fault], None]] = {
    "sleep": lambda fault: time.sleep(fault.seconds),
    "stop": lambda fault: stop_for(fault.seconds),
    "stop for good": lambda fault: stop_for(fault.seconds),
    "clock jumps": jump,
    "exception caught": fail_and_be_caught,
    "sys.exit(0)": leave,
    "SIGKILL": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "sys.exit(1)": lambda fault: sys.exit(1),
    "os._exit(0)": lambda fault: os._exit(0),
    "os._exit(3)": lambda fault: os._exit(3),
    "exception in loader": fail_in_loader,
    "MemoryError in arriving": run_out_of_memory,
    **{f"exception in {place}": fail for place in PLACES},
    **dict.fromkeys(LINK, lambda fault: None),  # whoever reads the history does it
}


def main() -> None:
    leave_out_the_compiler()
    register(FOLDER, RANK)
    torch.set_num_threads(1)
    HISTORY.write("begin", rank=RANK, size=PLAN.ranks, seed=PLAN.seed)
    faults = Faults()
    faults.at_start()
    with HISTORY.waiting("init"):
        hvd.init()
    policy = "group_average" if PLAN.load == "models" else PLAN.policy
    seed = f"{PLAN.seed} {RANK}"
    scene = Scene(HISTORY, RANK, PLAN.ranks, policy, PLAN.buckets, seed, PLAN.passes, within=faults.within)
    load = LOADS[PLAN.load](scene)
    rng = random.Random(f"{PLAN.seed} {RANK} pace")
    needs_big = [fault for fault in PLAN.faults if fault.kind == "MemoryError in arriving"]
    for step in range(PLAN.steps):
        faults.before_step(step)
        if any(fault.step == step and fault.rank != RANK for fault in needs_big):
            arrive_at_the_big_bucket(big_tensor())
        time.sleep(rng.uniform(0, PLAN.pace_ms[RANK]) / 1e3)
        load.step(step)
        if (step + 1) % PLAN.flush_every == 0:
            faults.before("flush")
            load.flush()
    faults.before("flush")
    load.flush()
    load.tell_closings()
    faults.before("exit")
    with HISTORY.waiting("shutdown"):
        hvd.shutdown()
    HISTORY.write("end")


if __name__ == "__main__":
    main()
