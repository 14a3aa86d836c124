"""Averages of models: in groups, of the ranks that are ready, by work; against gradients averaged over all ranks.

    .venv/bin/python benchmarks/group.py [--sections wagma ready communicators links] [--json FILE]

Without `--sections` it runs all of them. The first two train the regression of straggler.py, with fewer dimensions, so
that a rank's own steps converge: a step of C = 40 ms (a sleep), which delays make longer. Exchanges are named in
harness/exchanges.py. A throughput is the sum over the ranks of steps by time.

wagma           WAGMA-SGD's check (papers' numbers: 8 ranks, groups of 2 and 4): in every step two random ranks are
                delayed by D = C. Each rank serves its own delays, so the limit is C + D/4 a step, outside the rounds that
                are of all ranks. The distance is the largest between a replica and the mean of all, just before such a
                round (mean over those rounds); also for groups that never change, and without groups. Then the
                throughput without delays, over that of Full.
ready           P-Reduce's: one rank three times slower (with groups of 3 the limit is 2.75 of Full's steps: 7 + 1/3 against
                8/3), nobody slower, and one ten times slower, with and without weights by staleness. The loss there is
                that after a flush, and the mean over the run of what the replicas had.
communicators   What a group's reduction costs when its members have met often: two halves of the ranks at a time, by
                `hvd.average` and by Horovod's own allreduce in process sets of the same ranks. Both arms wait
                for all members (`max_staleness=0`); a third does not. The group's model is kept at each arrival, which
                is a copy, and part of the figures. Making the communicators is reported apart.
links           Ranks in network namespaces of their own, on links of 200 Mbit/s, without any compute; needs root, `ip`
                and `tc`. Both arms reduce by Open MPI's ring, which is faster for all ranks together than what it takes
                by itself, and its TCP transport sends in both directions at once (see harness/namespaces.py). With
                neither, measured with MPI alone, both arms take almost twice as long, and their ratio is about the same.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch
from harness import exchanges, namespaces
from harness.hyperplane import Hyperplane
from torch import nn

import horovod_partial.torch as hvd

WARM_UP = 50  # reductions before the first that counts

# --- Training --------------------------------------------------------------------------------------------------------

COMPUTE = 0.040  # seconds
DIMENSIONS = 1024
LEARNING_RATE = 0.01
SETTLING = 30  # steps before the first that counts: communicators are made, grace is learned


class Trainee:
    """A replica that is trained by one exchange."""

    def __init__(
        self,
        exchange: str,
        task: Hyperplane,
        lr: float = LEARNING_RATE,
        process_sets: Sequence[hvd.ProcessSet] = (),
    ) -> None:
        self.exchange = exchange
        self.model = task.model()
        self.optimizer = exchanges.make_optimizer(exchange, self.model, lr, process_sets)
        self.before_full: list[torch.Tensor] = []  # replicas, just before they were averaged over all ranks
        self.losses: list[tuple[float, float]] = []  # seconds of training, loss on the points for testing
        self._task = task
        self._step = 0

    def settle(self) -> None:
        """Take a few steps without any sleep."""
        for _ in range(SETTLING):
            self.step(None)
        self.optimizer.flush()
        hvd.barrier()

    def step(self, delays: harness.Delays | None) -> None:
        if delays is not None:
            time.sleep(COMPUTE)
            delays.serve(hvd.rank(), self._step)
        self.optimizer.zero_grad()
        self._task.loss(self.model, self._step).backward()
        before = nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
        self.optimizer.step()
        self._step += 1
        if exchanges.was_full(self.exchange, self.optimizer):
            self.before_full.append(before)

    def train(self, delays: harness.Delays, steps: int) -> list[tuple[float, bool]]:
        """Train for so many steps. Returns the seconds of each, and whether it waited for all ranks by schedule."""
        taken = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step(delays)
            taken.append((time.perf_counter() - start, exchanges.was_full(self.exchange, self.optimizer)))
        self.optimizer.flush()
        return taken

    def train_for(self, delays: harness.Delays, seconds: float, test_every: int = 0) -> float:
        """Train for about so long; losses are taken every few steps. Returns the throughput of all ranks."""
        hvd.barrier()
        in_step = exchanges.is_in_step(self.exchange)
        # Whole periods, so that as many averages are in it as there should be.
        periods = math.ceil(seconds / (COMPUTE + slowest(delays)) / exchanges.PERIOD)
        steps = periods * exchanges.PERIOD if in_step else None
        tested = 0.0
        start = time.perf_counter()
        taken = 0
        spent = 0.0
        while taken < steps if steps is not None else spent < seconds:
            self.step(delays)
            taken += 1
            spent = time.perf_counter() - start - tested
            if test_every and taken % test_every == 0:
                self.losses.append((spent, self.test_loss()))
                tested = time.perf_counter() - start - spent
        self.optimizer.flush()
        return sum(hvd.allgather_object(taken / spent))

    def test_loss(self) -> float:
        return self._task.test_loss(self.model)

    def distance(self) -> float:
        """On every rank: the largest distance of a replica from the mean, before rounds of all; mean over those."""
        rounds = min(hvd.allgather_object(len(self.before_full)))
        replicas = torch.stack(self.before_full[1:rounds])  # the first is that of the start
        means = hvd.allreduce(replicas, name="distance")
        distances = hvd.allgather((replicas - means).norm(dim=1)[None], name="distances")
        return distances.max(dim=0).values.mean().item()


def slowest(delays: harness.Delays) -> float:
    """The mean over steps of the longest delay."""
    return statistics.fmean(max(delays.draw(step)) for step in range(20))


def none(ranks: int) -> harness.Delays:
    return harness.RandomVictims(ranks, 0, 0.0)


def mean(value: float, name: str) -> float:
    """Over the ranks."""
    return hvd.allreduce(torch.tensor([value], dtype=torch.float64), name=name).item()


def throughputs(
    stage: str,
    arms: list[str],
    task: Hyperplane,
    delays: harness.Delays,
    seconds: float,
    repeats: int,
    process_sets: Sequence[hvd.ProcessSet] = (),
) -> dict[str, list[float]]:
    """On every rank: steps by second of all ranks, for each arm, as often as asked for. The arms take turns."""
    trainees = {name: Trainee(name, task, process_sets=process_sets) for name in arms}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for trainee in trainees.values():
        trainee.settle()
    for repeat in range(repeats):
        for index, name in enumerate(harness.in_turn(arms, repeat)):
            harness.progress(stage, repeat * len(arms) + index, repeats * len(arms))
            rates[name].append(trainees[name].train_for(delays, seconds))
    return rates


def over_full(rates: dict[str, list[float]]) -> dict[str, float]:
    """The median over the repeats of each arm's throughput over that of Full."""
    return {
        name: statistics.median(rate / full for rate, full in zip(values, rates["full"], strict=True))
        for name, values in rates.items()
    }


# --- WAGMA -----------------------------------------------------------------------------------------------------------

WAGMA = ["full", "group_average:2", "group_average:4", "fixed_groups:2", "fixed_groups:4", "local_sgd"]
VICTIMS = 2


def wagma(steps: int, seeds: int, seconds: float, repeats: int) -> dict[str, Any]:
    """On every rank: figures of each arm under delays, means over the seeds; and throughputs without delays."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in WAGMA}
    for seed in range(seeds):
        task = Hyperplane(DIMENSIONS, rank=hvd.rank(), seed=seed)
        delays = harness.RandomVictims(hvd.size(), VICTIMS, COMPUTE, seed)
        for index, name in enumerate(WAGMA):
            harness.progress(f"wagma, seed {seed}", index, len(WAGMA))
            trainee = Trainee(name, task)
            hvd.barrier()
            taken = trainee.train(delays, steps)
            outside = [seconds for seconds, full in taken if not full] or [seconds for seconds, _ in taken]
            run = {
                "step_ms": mean(1e3 * statistics.fmean(outside), "outside"),
                "step_ms_with_full": mean(1e3 * statistics.fmean(seconds for seconds, _ in taken), "all"),
                "loss": mean(trainee.test_loss(), "loss"),
            }
            if name != "full":
                run["distance"] = trainee.distance()
            if "groups" in name or "group_" in name:
                stats = exchanges.model_statistics()[-1]
                run["late"] = sum(stats["late"]) / (sum(stats["late"]) + sum(stats["on_time"]))
            runs[name].append(run)
    means = {
        name: {key: statistics.fmean(run[key] for run in of_arm) for key in of_arm[0]} for name, of_arm in runs.items()
    }
    arms = ["full", "group_average:2", "group_average:4"]
    task = Hyperplane(DIMENSIONS, rank=hvd.rank(), seed=0)
    return {"delayed": means, "even": throughputs("wagma, no delay", arms, task, none(hvd.size()), seconds, repeats)}


def report_wagma(options: Any) -> dict[str, Any]:
    measured = harness.launch(
        wagma,
        asleep=True,
        ranks=options.ranks,
        transport=options.transport,
        steps=options.steps,
        seeds=options.seeds,
        seconds=options.seconds,
        repeats=options.repeats,
    )
    limit = 1e3 * COMPUTE * (1 + VICTIMS / options.ranks)
    even = over_full(measured["even"])
    full = measured["delayed"]["full"]
    figures: dict[str, Any] = {"limit_ms": limit, "throughput_over_full_without_delay": even, "arms": {}}
    rows = []
    for name, run in measured["delayed"].items():
        over = {
            "over_limit": run["step_ms"] / limit,
            "speedup": full["step_ms_with_full"] / run["step_ms_with_full"],
            "loss_over_full": run["loss"] / full["loss"],
        }
        figures["arms"][name] = run | over
        steps = [f"{run['step_ms']:.1f}", f"{over['over_limit']:.3f}", f"{run['step_ms_with_full']:.1f}"]
        rest = [f"{over['speedup']:.2f}", f"{run['loss']:.3f}", f"{over['loss_over_full']:.3f}"]
        distance = f"{run['distance']:.4f}" if "distance" in run else ""
        rows.append([name, *steps, *rest, distance, f"{even[name]:.3f}" if name in even else ""])
    columns = [
        "exchange",
        "step in ms",
        "over limit",
        "with full rounds",
        "speed-up",
        "loss",
        "over Full's",
        "distance",
    ]
    harness.print_table(
        f"{VICTIMS} random ranks of {options.ranks} late by C = {1e3 * COMPUTE:.0f} ms over {options.transport}, limit "
        f"{limit:.0f} ms (all: with full rounds; even: throughput over Full's without delays)",
        [*columns, "even"],
        rows,
    )
    return figures


# --- Ready groups ----------------------------------------------------------------------------------------------------

SLOWNESS = 3  # of the slow rank
STRAGGLING = 10
READY = ["full", "partial_reduce:3", "partial_reduce:4", "weighted_average:10,0.99"]
TARGET = 1.5  # loss; 1 is the noise, and 11 that of the start
STALENESS = ["partial_reduce:3", "partial_reduce:3,staleness"]
STALENESS_RATE = 0.003  # so that the run does not end where the loss has settled


def slow_rank(ranks: int, times: float) -> harness.Delays:
    return harness.SlowRank(ranks, ranks - 1, (times - 1) * COMPUTE)


def ready(seeds: int, seconds: float, repeats: int) -> dict[str, Any]:
    """On every rank: throughputs with a slow rank and without, times to the target, and losses with a straggler."""
    size = hvd.size()
    task = Hyperplane(DIMENSIONS, rank=hvd.rank(), seed=0)
    measured: dict[str, Any] = {
        "slow": throughputs("ready, one slow", READY, task, slow_rank(size, SLOWNESS), 2 * seconds, repeats),
        "even": throughputs("ready, no delay", READY[:3], task, none(size), seconds, repeats),
        "target_seconds": {name: [] for name in READY[:3]},
        "straggler": {name: [] for name in STALENESS},
    }
    measured["windows"] = windows()
    for seed in range(seeds):
        task = Hyperplane(DIMENSIONS, rank=hvd.rank(), seed=seed)
        for index, name in enumerate(READY[:3]):
            harness.progress(f"ready, target, seed {seed}", index, 3)
            trainee = Trainee(name, task)
            trainee.train_for(slow_rank(size, SLOWNESS), 120 * SLOWNESS * COMPUTE, test_every=2)
            reached = next((at for at, loss in trainee.losses if loss < TARGET), math.inf)
            measured["target_seconds"][name].append(statistics.median(hvd.allgather_object(reached)))
        for index, name in enumerate(STALENESS):
            harness.progress(f"ready, straggler, seed {seed}", index, len(STALENESS))
            trainee = Trainee(name, task, STALENESS_RATE)
            trainee.train_for(slow_rank(size, STRAGGLING), 3 * seconds, test_every=2)
            on_the_way = statistics.fmean(loss for _, loss in trainee.losses)
            losses = {"final": mean(trainee.test_loss(), "final"), "on_the_way": mean(on_the_way, "on_the_way")}
            measured["straggler"][name].append(losses)
    return measured


def windows() -> dict[str, int]:
    """On rank 0: of all groups of ready ranks so far, and how often the last ones did not connect all ranks."""
    stats = [one for one in exchanges.model_statistics() if "unconnected_windows" in one]
    return {
        "rounds": sum(one["rounds"] for one in stats),
        "unconnected": sum(one["unconnected_windows"] for one in stats),
    }


def report_ready(options: Any) -> dict[str, Any]:
    measured = harness.launch(
        ready,
        asleep=True,
        ranks=options.ranks,
        transport=options.transport,
        seeds=options.seeds,
        seconds=options.seconds,
        repeats=options.repeats,
    )
    ranks = options.ranks
    slow, even = over_full(measured["slow"]), over_full(measured["even"])
    target = {name: statistics.fmean(times) for name, times in measured["target_seconds"].items()}
    limit = (ranks - 1 + 1 / SLOWNESS) / (ranks / SLOWNESS)
    figures: dict[str, Any] = {
        "slow_over_full": slow,
        "slow_limit": limit,
        "even_over_full": even,
        "target_seconds": target,
        "target_speedup": {name: target["full"] / seconds for name, seconds in target.items()},
        "windows": measured["windows"],
        "straggler": {
            name: {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
            for name, runs in measured["straggler"].items()
        },
    }
    rows = []
    for name, ratio in slow.items():
        rate = statistics.median(measured["slow"][name])
        times = [f"{target[name]:.2f}", f"{target['full'] / target[name]:.2f}"] if name in target else ["", ""]
        rows.append([name, f"{rate:.1f}", f"{ratio:.2f}", f"{even[name]:.3f}" if name in even else "", *times])
    unconnected = measured["windows"]
    harness.print_table(
        f"One rank of {ranks} {SLOWNESS} times slower, over {options.transport}: limit {limit:.2f}; "
        f"{unconnected['unconnected']} windows of {unconnected['rounds']} unconnected",
        ["exchange", "steps/s", "over Full", "nobody slow", f"s to loss {TARGET}", "speed-up"],
        rows,
    )
    harness.print_table(
        f"One rank of {ranks} {STRAGGLING} times slower",
        ["exchange", "loss", "on the way"],
        [[name, f"{loss['final']:.4f}", f"{loss['on_the_way']:.4f}"] for name, loss in figures["straggler"].items()],
    )
    return figures


# --- Communicators ---------------------------------------------------------------------------------------------------

SIZES = {"4 B": 1, "1 MB": 250_000, "25 MB": 6_250_000}  # floats
BLOCK = {"4 B": 20, "1 MB": 10, "25 MB": 2}  # reductions in a row


def repeat_groups(blocks: int, process_sets: list[hvd.ProcessSet]) -> dict[str, Any]:
    """On every rank: for each size the mean seconds of a reduction in each block of each arm; and the first use."""
    measured: dict[str, Any] = {}
    halves = hvd.Schedule(lambda _, rank: next(i for i, ranks in enumerate(process_sets) if rank in ranks.ranks), 1)
    own = next(one for one in process_sets if one.included())
    for size, numbers in SIZES.items():
        model = torch.zeros(numbers)

        def in_set(rounds: int, model: torch.Tensor = model, size: str = size) -> None:
            for _ in range(rounds):
                hvd.allreduce_(model, name=f"set.{size}", process_set=own)

        waiting = Rounds(model, f"waiting.{size}", schedule=halves, max_staleness=0)
        wait_avoiding = Rounds(model, f"wait_avoiding.{size}", schedule=halves)
        arms = {"process set": in_set, "group": waiting.advance, "group, nobody waits": wait_avoiding.advance}
        for arm in arms.values():
            arm(WARM_UP)
        seconds = alternate(f"groups of {size}", arms, blocks, BLOCK[size])
        measured[size] = {"seconds": seconds, "first_use": waiting.first_use()}
    return measured


class Rounds:
    """Averages of one model in groups. The options are those of the policy."""

    def __init__(self, model: torch.Tensor, name: str, **options: Any) -> None:
        self._model = model
        self._name = name
        self._policy = hvd.GroupAverage(**({"period": None} | options))
        self._round = -1

    def advance(self, rounds: int) -> None:
        """Take part until so many more rounds have been; where nobody waits, a rank may arrive less often."""
        last = self._round + rounds
        while self._round < last:
            handle = hvd.average_async(self._model, self._policy, self._name)
            hvd.synchronize(handle)
            self._round = hvd.round_info(handle).round

    def first_use(self) -> dict[str, float]:
        """Communicators that this rank has made, and the milliseconds that it took."""
        stats = hvd.partial_stats()[self._name]
        return {"groups": stats["groups_made"], "milliseconds": 1e3 * stats["setup_seconds"]}


def alternate(stage: str, arms: dict[str, Callable[[int], None]], blocks: int, block: int) -> dict[str, list[float]]:
    """The mean seconds of a round in each block of each arm; means over the ranks. The arms take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(blocks):
        harness.progress(stage, index, blocks)
        for name in harness.in_turn(arms, index):
            hvd.barrier()
            start = time.perf_counter()
            arms[name](block)
            seconds[name].append((time.perf_counter() - start) / block)
    means = hvd.allreduce(torch.tensor(list(seconds.values()), dtype=torch.float64), name=f"{stage}.seconds")
    return dict(zip(seconds, means.tolist(), strict=True))


def report_communicators(options: Any) -> dict[str, Any]:
    half = options.ranks // 2
    measured = harness.launch(
        repeat_groups,
        ranks=options.ranks,
        transport=options.transport,
        process_sets=[range(half), range(half, options.ranks)],
        blocks=options.blocks,
    )
    figures: dict[str, Any] = {"over_process_set": {}, "milliseconds": {}, "first_use": {}}
    rows = []
    for size, of_size in measured.items():
        medians = {arm: 1e3 * statistics.median(seconds) for arm, seconds in of_size["seconds"].items()}
        ratios = {arm: median / medians["process set"] for arm, median in medians.items()}
        figures["milliseconds"][size] = medians
        figures["over_process_set"][size] = ratios
        figures["first_use"][size] = of_size["first_use"]
        rows += [[size, arm, f"{medians[arm]:.2f}", f"{ratios[arm]:.3f}"] for arm in medians]
    first = measured[next(iter(SIZES))]["first_use"]
    harness.print_table(
        f"A reduction in each half of {options.ranks} ranks, after {WARM_UP} of them, over {options.transport} (at "
        f"first use {first['milliseconds']:.2f} ms for {first['groups']} communicators on rank 0)",
        ["size", "by", "ms", "over process set"],
        rows,
    )
    return figures


# --- Links -----------------------------------------------------------------------------------------------------------

MEGABITS = 200  # per second, of each link in either direction
LINK_FLOATS = 5_000_000
LINK_GROUP, LINK_PERIOD = 2, 10
RING = {"coll_tuned_use_dynamic_rules": "1", "coll_tuned_allreduce_algorithm": "4"}


def limited(periods: int) -> dict[str, list[float]]:
    """On every rank: the seconds of a reduction over all ranks, in groups, and of all when it is the group's turn."""
    model = torch.zeros(LINK_FLOATS)
    groups = Rounds(model, "groups", schedule=hvd.Butterfly(LINK_GROUP), period=LINK_PERIOD)
    seconds: dict[str, list[float]] = {"all": [], "groups": [], "full round": [], "period": []}

    def everybody(rounds: int) -> None:
        for _ in range(rounds):
            hvd.allreduce_(model, name="everybody")

    def measure(arm: str, do: Callable[[int], Any], rounds: int) -> float:
        hvd.barrier()
        start = time.perf_counter()
        do(rounds)
        spent = time.perf_counter() - start
        seconds[arm].append(spent / rounds)
        return spent

    everybody(1)
    groups.advance(LINK_PERIOD)  # the first round is of all ranks too, and so is the last
    for period in range(periods):
        harness.progress("links", period, periods)
        measure("all", everybody, 2)
        in_groups = measure("groups", groups.advance, LINK_PERIOD - 1)
        in_full = measure("full round", groups.advance, 1)
        seconds["period"].append((in_groups + in_full) / LINK_PERIOD)
        measure("all", everybody, 2)
    return {
        arm: hvd.allreduce(torch.tensor(spent, dtype=torch.float64), name=f"{arm}.seconds").tolist()
        for arm, spent in seconds.items()
    }


def report_links(options: Any) -> dict[str, Any]:
    if reason := namespaces.missing():
        print(f"No limited links: {reason}")
        return {"skipped": reason}
    with namespaces.limited_links(options.ranks, MEGABITS, RING) as mpirun:
        seconds = harness.launch(limited, ranks=options.ranks, transport="mpi", command=mpirun, periods=options.periods)
    medians = {arm: statistics.median(spent) for arm, spent in seconds.items()}
    ranks = options.ranks
    arithmetic = (2 * (LINK_GROUP - 1) / LINK_GROUP) / (2 * (ranks - 1) / ranks)
    rows = [[arm, f"{median:.3f}", f"{median / medians['all']:.3f}"] for arm, median in medians.items()]
    harness.print_table(
        f"{4e-6 * LINK_FLOATS:.0f} MB on {ranks} ranks with links of {MEGABITS} Mbit/s (groups of {LINK_GROUP}: "
        f"{arithmetic:.3f} by the arithmetic of rings)",
        ["reduction", "s", "over all ranks"],
        rows,
    )
    return {
        "megabits": MEGABITS,
        "seconds": medians,
        "groups_over_all": medians["groups"] / medians["all"],
        "period_over_all": medians["period"] / medians["all"],
        "arithmetic": arithmetic,
    }


SECTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "wagma": report_wagma,
    "ready": report_ready,
    "communicators": report_communicators,
    "links": report_links,
}


def main() -> None:
    parser = harness.arguments(__doc__, ranks=8)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="what to measure")
    parser.add_argument("--steps", type=int, default=400, help="of each rank, under WAGMA-SGD's delays")
    parser.add_argument("--seeds", type=int, default=1, help="runs to average, where a loss is measured")
    parser.add_argument("--seconds", type=float, default=1.5, help="that each measurement of a throughput takes")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of a throughput over Full's")
    parser.add_argument("--blocks", type=int, default=10, help="of each arm, in the section on communicators")
    parser.add_argument("--periods", type=int, default=3, help="of rounds, in the section on links")
    options = parser.parse_args()
    figures: dict[str, Any] = {"ranks": options.ranks, "transport": options.transport}
    for section in options.sections:
        figures[section] = SECTIONS[section](options)
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
