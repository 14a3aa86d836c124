"""One rank of a job with faults: `worker.py FOLDER`, where the job's plan is, and where the histories go.

It does its load, lets happen to itself what the plan says, and writes its history. It checks nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import queue
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness.buckets import collect
from harness.rank import rank_of_environment, register
from history import COPIES, Writer, contribution
from plan import Fault, Plan

import horovod_partial.torch as hvd

FOLDER = Path(sys.argv[1])
PLAN = Plan.from_json(json.loads((FOLDER / "plan.json").read_text()))
RANK = rank_of_environment()
HISTORY = Writer(FOLDER, RANK)

# Arrivals that close a round, by policy and number of ranks; the replay limit and the bound of staleness are the defaults.
QUORUM: dict[str, Callable[[int], int]] = {
    "solo": lambda size: 1,
    "majority": lambda size: -(-size // 2),
    "majority:random": lambda size: 1,
    "quorum:0.75": lambda size: -(-3 * size // 4),
    "full": lambda size: size,
}
STALENESS = REPLAY_LIMIT = 8
SPARE_MEMORY = 4 << 20  # that is left to a rank which is to run out of it
BIG = 64 << 20  # bytes of the bucket for which it has no memory


def describe(bucket: str, *, optimizer: bool) -> None:
    """Say what is promised of a bucket."""
    needed = QUORUM[PLAN.policy](PLAN.ranks)
    bounds = {"quorum": needed, "staleness": STALENESS, "limit": REPLAY_LIMIT}
    HISTORY.write("bucket", b=bucket, policy=PLAN.policy, optimizer=optimizer, **bounds)


def tell_result(bucket: str, result: torch.Tensor, round: int | None, **more: Any) -> None:
    copies = result.reshape(COPIES, -1)
    low, high = ([int(x) for x in bound.tolist()] for bound in (copies.amin(0), copies.amax(0)))
    HISTORY.write("result", b=bucket, round=round, low=low, high=high, **more)


class PlannedError(RuntimeError):
    """A planned failure."""


class Operations:
    """Arrivals at single buckets, whose results are collected after a flush."""

    def __init__(self, faults: Faults) -> None:
        self._rng = random.Random(f"{PLAN.seed} {RANK}")
        self._names = [f"bucket.{index}" for index in range(PLAN.buckets)]
        self._faults = faults
        for name in self._names:
            describe(name, optimizer=False)

    def step(self, number: int) -> None:
        values = contribution(RANK, number, PLAN.ranks) * COPIES
        handles = []
        for name in self._names:
            tensor = torch.tensor(values, dtype=torch.int64)
            HISTORY.write("submit", b=name, s=number)
            start = self._rng.choice((hvd.partial_allreduce_async_, hvd.partial_allreduce_async))
            handles.append(start(tensor, name=name, op=hvd.Sum, sync=PLAN.policy))
        for name, handle in zip(self._names, handles, strict=True):
            with HISTORY.waiting("round"):
                result = hvd.synchronize(handle)
            info = hvd.round_info(handle)
            round = number if PLAN.policy == "full" else info.round
            tell_result(name, result, round, s=number, late=info.late, missed=info.staleness)

    def flush(self) -> None:
        with HISTORY.waiting("flush"):
            hvd.flush()
        if PLAN.policy != "full":
            for name in self._names:
                like = torch.zeros(2 * PLAN.ranks * COPIES, dtype=torch.int64)
                tell_result(name, collect(name, like), None)
        HISTORY.write("flushed")


class Optimizer:
    """Steps of an optimizer whose parameters fall by the results of their rounds: SGD with a rate of 1."""

    def __init__(self, faults: Faults) -> None:
        size = 2 * PLAN.ranks * COPIES
        self._faults = faults
        self._parameters = [torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for _ in range(PLAN.buckets)]
        self._names = [f"parameter.{index}" for index in range(PLAN.buckets)]
        self._before = [parameter.detach().clone() for parameter in self._parameters]
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._parameters, lr=1.0),
            zip(self._names, self._parameters, strict=True),
            op=hvd.Sum,
            sync=PLAN.policy,
        )
        self._optimizer.register_round_hook(self._tell_round)
        self._rounds = 0
        for name in self._names:
            describe(name, optimizer=True)

    def step(self, number: int) -> None:
        values = torch.tensor(contribution(RANK, number, PLAN.ranks) * COPIES, dtype=torch.float64)
        for name in self._names:
            HISTORY.write("submit", b=name, s=number)
        self._optimizer.zero_grad()
        self._faults.within("forward")
        hooks = [p.register_hook(lambda _: self._faults.within("hook")) for p in self._parameters]
        loss = sum((parameter * values).sum() for parameter in self._parameters)
        if self._faults.comes("exception in backward"):
            loss = _FailsInBackward.apply(loss)
        loss.backward()
        for hook in hooks:
            hook.remove()
        with HISTORY.waiting("round"):
            self._optimizer.step()

    def _tell_round(self, _: Any) -> None:
        for name, parameter, before in zip(self._names, self._parameters, self._before, strict=True):
            tell_result(name, before - parameter.detach(), self._rounds)
            before.copy_(parameter.detach())
        self._rounds += 1
        self._faults.within("callback")

    def flush(self) -> None:
        with HISTORY.waiting("flush"):
            self._optimizer.flush()
        HISTORY.write("flushed")
        tell_model(self._parameters)


class Models:
    """Averages of models in groups, whose communicators are made on the way. Only their ends and replicas are told."""

    def __init__(self, faults: Faults) -> None:
        torch.manual_seed(0)
        self._parameter = torch.nn.Parameter(torch.randn(1000))
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([self._parameter], lr=0.01), sync=hvd.GroupAverage(2, period=5)
        )

    def step(self, number: int) -> None:
        self._optimizer.zero_grad()
        (self._parameter * (RANK + number)).sum().backward()
        with HISTORY.waiting("round"):
            self._optimizer.step()

    def flush(self) -> None:
        with HISTORY.waiting("flush"):
            self._optimizer.flush()
        HISTORY.write("flushed")
        tell_model([self._parameter])


LOADS: dict[str, Callable[[Faults], Any]] = {"operations": Operations, "optimizer": Optimizer, "models": Models}


def tell_model(parameters: list[torch.nn.Parameter]) -> None:
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)).hexdigest()
    HISTORY.write("replica", digest=digest[:16])


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise PlannedError("in backward")


class Faults:
    """What the plan has for this rank."""

    def __init__(self) -> None:
        self._mine = [fault for fault in PLAN.faults if fault.rank == RANK]
        self._step = -1

    def comes(self, kind: str) -> bool:
        """Whether a fault of this kind comes in this step; if so it is told."""
        for fault in self._mine:
            if fault.kind == kind and fault.step == self._step:
                tell_fault(fault)
                return True
        return False

    def within(self, place: str) -> None:
        """Raise where the plan says so, in this place of a step."""
        if self.comes(f"exception in {place}"):
            raise PlannedError(f"in {place}")

    def at_start(self) -> None:
        for fault in self._mine:
            if fault.kind == "starts late":
                tell_fault(fault)
                time.sleep(fault.seconds)

    def before_step(self, number: int) -> None:
        self._step = number
        for fault in self._mine:
            if fault.step == number and fault.moment in ("step", "groups"):
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
    """What comes before a step. Kinds that come elsewhere are left to `Faults.comes`."""
    if fault.moment == "groups":
        kill_soon(fault)
    elif fault.kind in HAPPENINGS:
        tell_fault(fault)
        HAPPENINGS[fault.kind](fault)


def stop(fault: Fault) -> None:
    pid = os.getpid()
    script = f"kill -STOP {pid}; sleep {fault.seconds}; kill -CONT {pid}"
    subprocess.Popen(
        ["sh", "-c", script],
        env={"PATH": os.environ["PATH"]},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


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


def catch(_: Fault) -> None:
    """As programs do that skip a bad batch."""
    try:
        raise PlannedError("to be caught")
    except PlannedError:
        pass


def leave(_: Fault) -> None:
    HISTORY.write("leave")
    sys.exit(0)


def run_out_of_memory(_: Fault) -> None:
    tensor = torch.ones(BIG // 8, dtype=torch.float64)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + SPARE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with HISTORY.waiting("round"):
        hvd.partial_allreduce_(tensor, name="big", op=hvd.Sum, sync="solo")


def meet_the_big_bucket() -> None:
    """All others bring to it what one rank cannot."""
    with HISTORY.waiting("round"):
        hvd.partial_allreduce_(torch.ones(BIG // 8, dtype=torch.float64), name="big", op=hvd.Sum, sync="solo")


HAPPENINGS: dict[str, Callable[[Fault], None]] = {
    "sleep": lambda fault: time.sleep(fault.seconds),
    "stop": stop,
    "stop for good": stop,
    "clock jumps": jump,
    "exception caught": catch,
    "sys.exit(0)": leave,
    "SIGKILL": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "sys.exit(1)": lambda fault: sys.exit(1),
    "os._exit(0)": lambda fault: os._exit(0),
    "os._exit(3)": lambda fault: os._exit(3),
    "exception in loader": fail_in_loader,
    "MemoryError in arriving": run_out_of_memory,
}


def rounds_closed() -> Iterator[tuple[str, dict[str, int]]]:
    """Why the rounds of each bucket have closed; in an optimizer buckets stand for parameters in their order."""
    for name, of in sorted(hvd.partial_stats().items()):
        yield name, of["closed_by"]


def tell_closings() -> None:
    closings = list(rounds_closed())
    excuses = {
        reason: max((of.get(reason, 0) for _, of in closings), default=0) for reason in ("liveness", "flush", "end")
    }
    names = [f"{'bucket' if PLAN.load == 'operations' else 'parameter'}.{index}" for index in range(PLAN.buckets)]
    for name in names:
        HISTORY.write("closed", b=name, by=dict(closings).get(name, excuses))


def main() -> None:
    register(FOLDER, RANK)
    torch.set_num_threads(1)
    HISTORY.write("begin", rank=RANK, size=PLAN.ranks, seed=PLAN.seed)
    faults = Faults()
    faults.at_start()
    with HISTORY.waiting("init"):
        hvd.init()
    load = LOADS[PLAN.load](faults)
    rng = random.Random(f"{PLAN.seed} {RANK} pace")
    needs_big = [fault for fault in PLAN.faults if fault.kind == "MemoryError in arriving"]
    for step in range(PLAN.steps):
        faults.before_step(step)
        if any(fault.step == step and fault.rank != RANK for fault in needs_big):
            meet_the_big_bucket()
        time.sleep(rng.uniform(0, PLAN.pace_ms[RANK]) / 1e3)
        load.step(step)
        if (step + 1) % PLAN.flush_every == 0:
            faults.before("flush")
            load.flush()
    faults.before("flush")
    load.flush()
    tell_closings()
    faults.before("exit")
    with HISTORY.waiting("shutdown"):
        hvd.shutdown()
    HISTORY.write("end")


if __name__ == "__main__":
    main()
