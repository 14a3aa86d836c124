"""Runs the jobs of some seeds, and says what is wrong with each.

    .venv/bin/python tests/faults/run.py --transport gloo --seeds 0:150 [--results FILE]

With a file of results, seeds that are in it are not run again, so that a long run can be resumed. What a job has left is
kept where something was wrong.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import checker
from history import Event, read
from jobs import TRANSPORTS, Host, Processes, Results, Setup, build_double, start
from plan import ABORT_SECONDS, BOUND_SECONDS, LINK, LONGEST_SECONDS, SCENARIOS, Fault, Plan, draw, scenario

START_SECONDS = 90.0  # for a job to start and to do its load, on a busy machine
# Over either transport Horovod's launcher may report success after a rank was killed or has left with status 0.
WITHOUT_STATUS = ("SIGKILL", "os._exit(0)")


def run(plan: Plan, folder: Path) -> list[str]:
    """What is wrong with a job: that it hangs, leaves processes, ends otherwise than it should; and the checker's findings."""
    (folder / "plan.json").write_text(json.dumps(plan.as_json()))
    variables = {"LD_PRELOAD": str(build_double("clock_double", folder))}
    if any(fault.kind == "cannot record" for fault in plan.faults):
        variables["HOROVOD_PARTIAL_RECORD"] = "/dev/full"  # no folder
    if plan.aborts:
        variables["HOROVOD_PARTIAL_ABORT_SECONDS"] = str(ABORT_SECONDS)
    job = start("worker.py", setup_of(plan), folder, **variables)
    try:
        hang = wait(job, plan, folder)
        status = job.popen.poll()
    finally:
        job.kill()
    problems = [hang] if hang else []
    histories = read(folder)
    return problems + (ends(plan, histories, status) if not hang else []) + checker.check(histories)


def setup_of(plan: Plan) -> Setup:
    return Setup(plan.transport, plan.ranks, hosts=plan.hosts)


def wait(job: Processes, plan: Plan, folder: Path) -> str | None:
    """Wait until the launcher and all that it has started have ended. What is wrong if they do not."""
    limit = time.monotonic() + START_SECONDS + plan.seconds + BOUND_SECONDS
    links = [fault for fault in plan.faults if fault.kind in LINK]
    fatal: float | None = None
    restored = math.inf
    with ExitStack() as disturbed:
        while True:
            ended, left = job.popen.poll() is not None, job.left()
            if ended and not left:
                return None
            now = time.monotonic()
            if links and first(read(folder), links[:1]) is not None:
                link = links.pop(0)
                disturbed.enter_context(disturb(job.host_of(link.rank), link))
                restored = now + link.seconds
            if now > restored:
                disturbed.close()
                restored = math.inf
            if plan.fatal and fatal is None:
                fatal = first(read(folder), plan.fatal)
            if now > limit or (fatal is not None and now > fatal + plan.bound_seconds):
                launcher = f"the launcher has {'' if ended else 'not '}ended"
                return f"hangs: {launcher}, processes {left} are left\n{job.dump()}"
            time.sleep(0.05)


def disturb(host: Host, fault: Fault) -> AbstractContextManager[None]:
    """With this fault of the cable of a host."""
    return {"link cut": host.cut, "link slow": host.slow, "link lossy": host.lossy}[fault.kind]()


def ends(plan: Plan, histories: dict[int, list[Event]], status: int | None) -> list[str]:
    """Whether a job has ended as it should."""
    if not plan.fatal:
        over = {rank for rank, events in histories.items() if any(event["e"] in ("end", "leave") for event in events)}
        unfinished = sorted(set(range(plan.ranks)) - over)
        wrong = f"the job ended with status {status}; rank(s) {unfinished} have not come to their end"
        return [wrong] if status or unfinished else []
    if all(fault.moment == "exit" for fault in plan.fatal) and not status:
        return []  # the rank was gone before it could be killed
    if first(histories, plan.fatal) is None:
        return [f"the job ended with status {status} before the fault came"]
    silent = all(fault.kind in WITHOUT_STATUS for fault in plan.fatal)
    return [] if status or silent else ["a rank has failed, and the job reports success"]


def went_on(histories: dict[int, list[Event]]) -> list[str]:
    """Whether the others went on while a rank was asleep: until it had missed as many rounds as it may."""
    (slept,) = faults(histories)
    events = next(events for events in histories.values() if slept in events)
    bounds = {event["b"]: event["staleness"] for event in events if event["e"] == "bucket"}
    missed = dict.fromkeys(bounds, 0)  # so it stays where the rank has got nothing any more
    for event in reversed(events):  # so the first result after the sleep is what counts
        if event["e"] == "result" and event["round"] is not None and event["t"] > slept["t"]:
            missed[event["b"]] = event["missed"]
    return [
        f"while a rank slept, the others got {missed[name]} rounds of {name}; {bound} they may"
        for name, bound in bounds.items()
        if missed[name] < bound
    ]


def faults(histories: dict[int, list[Event]]) -> list[Event]:
    return [event for events in histories.values() for event in events if event["e"] == "fault"]


def first(histories: dict[int, list[Event]], planned: Sequence[Fault]) -> float | None:
    """When the first fault of these kinds came, if one has."""
    kinds = {fault.kind for fault in planned}
    return min((event["t"] for event in faults(histories) if event["kind"] in kinds), default=None)


def run_here(plan: Plan, name: str = "drawn") -> dict[str, Any]:
    """Run a job in a folder of its own, which stays if something is wrong; what there is to tell of it."""
    folder = Path(tempfile.mkdtemp(prefix=f"faults-{plan.transport}-{plan.seed}-"))
    began = time.monotonic()
    problems = run(plan, folder)
    histories = read(folder)
    if name == "asleep" and not problems:
        problems = went_on(histories)
    told = {event["kind"] for event in faults(histories)}
    if not problems:
        shutil.rmtree(folder)
    return {
        "scenario": name,
        "seed": plan.seed,
        "transport": plan.transport,
        "load": f"{plan.load}, {plan.policy}, {plan.ranks} ranks",
        "passes": plan.passes,
        "faults": [f"{fault.kind} at a {fault.moment}, rank {fault.rank}" for fault in plan.faults],
        "came": sorted(told),
        "seconds": round(time.monotonic() - began, 1),
        "problems": problems,
        "folder": str(folder) if problems else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=TRANSPORTS, required=True)
    parser.add_argument("--seeds", default="0:18", help="FIRST:BEHIND_THE_LAST, or a single one")
    parser.add_argument("--scenario", choices=("drawn", *SCENARIOS), default="drawn", help="what happens")
    parser.add_argument("--load", choices=("sharing",), help="of all drawn jobs; else it is drawn as well")
    parser.add_argument("--longest-seconds", type=float, default=LONGEST_SECONDS, help="of faults that pass")
    parser.add_argument("--results", type=Path, help="file to which a line is added for each seed")
    options = parser.parse_args()
    first, _, behind = options.seeds.partition(":")
    seeds = range(int(first), int(behind) if behind else int(first) + 1)
    results = Results(options.results)
    done = {(result["scenario"], result["transport"], result["seed"]) for result in results.read()}
    failed = 0
    for seed in seeds:
        if (options.scenario, options.transport, seed) in done:
            continue
        if options.scenario == "drawn":
            plan = draw(seed, options.transport, options.longest_seconds, options.load)
        else:
            plan = scenario(options.scenario, seed, options.transport)
        if reason := setup_of(plan).unavailable:
            parser.exit(1, f"{reason}\n")
        result = run_here(plan, options.scenario)
        failed += bool(result["problems"])
        results.add(result)
    print(f"{failed} with problems")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
