"""What happens in a job with faults: a function of the seed and the transport.

A job has a *load*, which all ranks do, and *faults*, each of one rank at one moment. Faults of `PASSING` kinds end by
themselves, and the job must go on to its end with nothing lost. Those of `LEAVING` kinds end a rank in good order, and the
others go on. Those of `FATAL` kinds end the job: within `BOUND_SECONDS` no process may be left, and the job has failed.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

PASSING = ("sleep", "stop", "starts late", "clock jumps", "cannot record", "exception caught")
LEAVING = ("sys.exit(0)",)
FATAL = (
    "SIGKILL",
    "sys.exit(1)",
    "os._exit(0)",
    "os._exit(3)",
    "exception in forward",
    "exception in backward",
    "exception in hook",
    "exception in loader",
    "exception in callback",
    "MemoryError in arriving",
    "stop for good",
)
# What happens to the cable of a rank's host, where there are several: `run.py` does it when the rank has told of it.
LINK = ("link cut", "link slow", "link lossy")
# Gloo waits so long for another rank by default; over MPI nobody minds.
GLOO_TIMEOUT_SECONDS = 30.0
# Faults that pass last this long at most, unless asked otherwise: near Gloo's timeout a job may end either way.
LONGEST_SECONDS = 25.0
# When a fault comes: before a step, while a flush waits, while communicators of groups are made, while the rank ends; or in
# one of these places, the first time that the rank comes there in its step or later.
PLACES = ("forward", "backward", "hook", "callback")
MOMENTS = {"SIGKILL": ("step", "flush", "groups", "exit")} | {f"exception in {place}": (place,) for place in PLACES}
# In shared updates a micro-batch has begun before a step; in backward it is under way, and a callback is a round hook.
SHARING_MOMENTS = MOMENTS | {
    "SIGKILL": ("step", "flush", "exit", "backward", "callback"),
    "sleep": ("step", "backward", "callback"),
    "stop": ("step", "backward", "callback"),
    "exception caught": ("step", *PLACES),
}
# All ranks wait for each other there, in the middle of their micro-batches.
NOT_SHARING = ("MemoryError in arriving",)
# After a stop of so many seconds the job ends, where HOROVOD_PARTIAL_ABORT_SECONDS is set; and by when no process is left.
ABORT_SECONDS, ABORTED_SECONDS = 5.0, 15.0
STOPPED_SECONDS = 60.0  # for good, but for a machine that is to be used again
# Within this time after the fault's end the job has ended, or goes on (docs/reliability.md).
BOUND_SECONDS = 60.0

POLICIES = ("solo", "majority", "majority:random", "quorum:0.75", "full")
STEPS = 40


@dataclass(frozen=True)
class Fault:
    """One rank's.

    Attributes:
        kind: of those above.
        rank: whose.
        step: of the rank's load, before which or in which it comes.
        moment: of `MOMENTS` or `SHARING_MOMENTS`; for most kinds it is always `"step"`.
        seconds: how long it lasts, where it passes.
    """

    kind: str
    rank: int
    step: int
    moment: str = "step"
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A job.

    Attributes:
        seed, transport: what it was drawn from.
        ranks: how many.
        hosts: over which the ranks are spread.
        load: `"operations"`, single arrivals; `"optimizer"`, the steps of one; `"sharing"`, the micro-batches of one whose
            updates are shared; or `"models"`, averages of models.
        policy: of gradients.
        buckets: how many, in an optimizer the number of parameters.
        steps: of each rank, with a flush after every `flush_every`.
        passes: micro-batches of an update for each rank, where they are shared.
        pace_ms: how long each rank takes for a step, at most.
        faults: in the order of their steps.
    """

    seed: int
    transport: str
    ranks: int
    load: str
    policy: str
    buckets: int
    steps: int
    flush_every: int
    pace_ms: tuple[float, ...]
    faults: tuple[Fault, ...]
    passes: int = 1
    hosts: int = 1

    @property
    def aborts(self) -> bool:
        """Whether ranks give each other signs of life, so that one that is stopped for long ends the job."""
        return any(fault.kind == "stop for good" for fault in self.faults)

    @property
    def bound_seconds(self) -> float:
        """How long after a fatal fault has begun the last process may be there."""
        if self.aborts:
            return ABORTED_SECONDS
        return BOUND_SECONDS + sum(fault.seconds for fault in self.fatal if self._outlasts_gloo(fault))

    @property
    def fatal(self) -> list[Fault]:
        """The faults that end the job."""
        return [fault for fault in self.faults if fault.kind in FATAL or self._outlasts_gloo(fault)]

    def _outlasts_gloo(self, fault: Fault) -> bool:
        silent = fault.kind in ("stop", "starts late", "link cut")
        return self.transport == "gloo" and silent and fault.seconds > GLOO_TIMEOUT_SECONDS

    @property
    def seconds(self) -> float:
        """How long its passing faults last, all together."""
        return sum(fault.seconds for fault in self.faults)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Plan:
        faults = tuple(Fault(**fault) for fault in values["faults"])
        return Plan(**{**values, "pace_ms": tuple(values["pace_ms"]), "faults": faults})


def draw(seed: int, transport: str, longest_seconds: float = LONGEST_SECONDS, load: str | None = None) -> Plan:
    """The job of a seed. Consecutive seeds go through all kinds of faults, and through the moments of each.

    Args:
        seed: 0 or more.
        transport: `"gloo"` or `"mpi"`.
        longest_seconds: of a fault that passes.
        load: `"sharing"`, or drawn as well.
    """
    rng = random.Random(f"{transport} {seed}")
    drawn = rng.choice(("operations", "optimizer", "sharing"))
    kinds = [kind for kind in (*PASSING, *LEAVING, *FATAL, "none") if load != "sharing" or kind not in NOT_SHARING]
    last, rest = kinds[seed % len(kinds)], seed // len(kinds)
    load = load or drawn
    if last in NOT_SHARING or (load == "operations" and "exception" in last):
        load = "optimizer"
    ranks = rng.choice((2, 3, 3, 4))
    moments_of = SHARING_MOMENTS if load == "sharing" else MOMENTS
    moments = moments_of.get(last, ("step",))
    moment = moments[rest % len(moments)]
    faults = []
    for _ in range(rng.randrange(3)):  # before the fault that the seed is about
        kind = rng.choice(("sleep", "stop"))
        early = rng.choice(moments_of.get(kind, ("step",)))
        step, seconds = rng.randrange(2, STEPS // 2), rng.uniform(0.2, 1.0)
        faults.append(Fault(kind, rng.randrange(ranks), step, early, seconds))
    if last in PASSING:
        seconds = min(longest_seconds, rng.choice((0.2, 1.0, 3.0, 10.0, 30.0)) * rng.uniform(0.8, 1.2))
        faults.append(Fault(last, rng.randrange(ranks), rng.randrange(STEPS), moment, seconds))
    elif last != "none":
        rank = rest % ranks if last == "SIGKILL" else rng.randrange(ranks)
        seconds = STOPPED_SECONDS if last == "stop for good" else 0.0
        faults.append(Fault(last, rank, rng.randrange(STEPS // 2, STEPS), moment, seconds))
    policy = "work_sharing" if load == "sharing" else rng.choice(POLICIES)
    if moment == "groups":
        load = "models"
    if last in LEAVING and policy == "full":
        policy = "solo"  # under Full the others cannot go on
    return Plan(
        seed=seed,
        transport=transport,
        ranks=ranks,
        load=load,
        policy=policy,
        buckets=rng.randint(1, 4),
        steps=STEPS,
        flush_every=rng.choice((7, 13, 100)),
        pace_ms=tuple(rng.choice((1.0, 1.0, 5.0, 20.0)) for _ in range(ranks)),
        faults=tuple(sorted(faults, key=lambda fault: fault.step)),
        passes=rng.randint(1, 4) if load == "sharing" else 1,
    )


# What is promised of single faults, each to be tried many times: see docs/reliability.md. By name the fault, and how long
# it lasts: the seed chooses among several.
SCENARIOS = {
    "asleep": ("sleep", (10.0,)),
    "stopped": ("stop", (10.0,)),
    "aborted": ("stop for good", (STOPPED_SECONDS,)),
    "late": ("starts late", (60.0,)),
    "cut": ("link cut", (1.0, 10.0, 60.0)),
    "slow": ("link slow", (10.0,)),
    "lossy": ("link lossy", (10.0,)),
}


def scenario(name: str, seed: int, transport: str) -> Plan:
    """A job of four ranks, with one fault; on two hosts if it is one of their cables.

    Args:
        name: of `SCENARIOS`.
        seed: draws the policy, the rank and the step.
        transport: `"gloo"` or `"mpi"`.
    """
    rng = random.Random(f"{name} {seed}")
    kind, seconds = SCENARIOS[name]
    fault = Fault(kind, rng.randrange(4), rng.randrange(10, 30), seconds=seconds[seed % len(seconds)])
    return Plan(
        seed=seed,
        transport=transport,
        ranks=4,
        load="operations",
        policy=("solo", "majority")[seed % 2],
        buckets=2,
        steps=60,
        flush_every=100,
        pace_ms=(5.0,) * 4,
        faults=(fault,),
        hosts=2 if kind in LINK else 1,
    )
