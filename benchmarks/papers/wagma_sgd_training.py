"""What WAGMA-SGD does to accuracy: stand-ins for its Figs. 5 and 8, and the ablations of its section 5.2."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import rivals
from eager_sgd_throughput import resnet50, seconds_of
from eager_sgd_training import (
    FULL,
    FULL_NAME,
    TEN_EPOCHS,
    Arm,
    Setting,
    Trained,
    limit_rows,
    measured,
    published,
    train_all,
)
from experiment import Job, Outcome, Plot, Row
from wagma_sgd_throughput import (
    IMAGE_COMPUTE,
    IMAGE_DELAY,
    IMAGE_PERIOD,
    IMAGE_VICTIMS,
    TEXT_BYTES,
    TEXT_PERIOD,
    TEXT_QUARTILES,
    Floats,
    sentences,
)

from horovod_partial.insight.simulate import Cluster, RandomRanks, Trace
from horovod_partial.policies import GroupAverage

# Two ranks are late by 0.32 s, as in Fig. 4. In Fig. 5 each of the 64 ranks has 64 images. AD-PSGD takes 28,150 steps in 165 minutes,
# 0.35 s a step, of which 0.01 s is the mean delay. So a step takes 0.34 s, and ranks are late by 0.94 of a step; here too.
IMAGES = Setting("digits", steps=200, lr=0.4, compute_ms=31, delay_ms=29, victims=2)
TEXT = Setting("sequences", steps=160, lr=0.7, compute_ms=25)

# The square root of 8 lies between 2 and 4.
WAGMA = "WAGMA-SGD (groups of 4)"
SMALL = "WAGMA-SGD (groups of 2)"
OVERLAPPED = "WAGMA-SGD (groups of 4), with overlap"
OURS = (SMALL, WAGMA, OVERLAPPED)
ARMS = {
    FULL_NAME: FULL,
    "D-PSGD": Arm("d_psgd"),
    "SGP (1n)": Arm("push_sum:1"),
    "SGP (2n)": Arm("push_sum:2"),
    "SGP (2n), overlapped": Arm("push_sum:2:overlap"),
    "AD-PSGD": Arm("ad_psgd"),
    "eager-SGD (majority)": published("majority", TEN_EPOCHS),
    "eager-SGD (solo)": published("solo", TEN_EPOCHS),
    SMALL: Arm("group_average:2"),
    WAGMA: Arm("group_average:4"),
    OVERLAPPED: Arm("group_average:4,overlap=gradient"),
}
# Speed-up over Allreduce-SGD, of the minutes that the paper plots, and its accuracy or score.
IMAGES_PAPER = {
    FULL_NAME: ("1", "75.9"),
    "D-PSGD": ("1.16", "71.3"),
    "SGP (2n)": ("1.13", "74.8"),
    "AD-PSGD": ("2.28", "66.9"),
    "SGP (2n), overlapped": ("", ""),
    "eager-SGD (majority)": ("1.21", ""),
    "eager-SGD (solo)": ("", ""),
    WAGMA: ("1.63", "75.3"),
}
TEXT_PAPER = {
    FULL_NAME: ("1", "25.72"),
    "D-PSGD": ("1.31", "25.69"),
    "SGP (1n)": ("1.34", "25.75"),
    "SGP (2n)": ("1.21", "26.01"),
    "AD-PSGD": ("1.63", "25.21"),
    WAGMA: ("1.80", "26.12"),
}


def images(job: Job) -> Outcome:
    """Fig. 5: accuracy and time where two random ranks are late in each step."""
    return _compare(job, IMAGES, IMAGES_PAPER, "accuracy in % (paper: ImageNet, here: digits)")


def text(job: Job) -> Outcome:
    """Fig. 8: quality and time where steps are as long as their sequences."""
    return _compare(job, TEXT, TEXT_PAPER, "accuracy in % (paper: BLEU, here: sequences)")


def _compare(job: Job, setting: Setting, paper: dict[str, tuple[str, str]], quality: str) -> Outcome:
    arms = {name: arm for name, arm in ARMS.items() if name in paper or name in OURS}
    trained = _train(job, arms, replace(setting, steps=job.choose(setting.steps, 8)))
    rows = []
    for name, run in trained.items():
        speed_up, of_paper = paper.get(name, ("", ""))
        rows.append(Row(f"{name}: speed-up over Full", speed_up, run.speed_up, "measured"))
        rows.append(Row(f"{name}: {quality}", of_paper, run.accuracy, "measured"))
    rows += limit_rows(trained)
    full = trained[FULL_NAME]
    best = max(OURS, key=lambda name: trained[name].speed_up)
    others = [name for name in trained if name not in (*OURS, FULL_NAME)]
    faster = [name for name in others if trained[name].speed_up > trained[best].speed_up]
    better = [name for name in others if trained[name].accuracy > trained[best].accuracy]
    verdict = (
        f"{best} is {trained[best].speed_up:.2f} times as fast as Full. Faster rivals: {'; '.join(faster) or 'none'}. Its accuracy "
        f"differs from Full's by {trained[best].accuracy - full.accuracy:+.1f} points. More accurate rivals: "
        f"{'; '.join(better) or 'none'} (deviation over the seeds up to {_deviation(trained):.1f}). Local SGD with an average in every "
        "step, as in the paper, would be the same as Full."
    )
    series = {name: ([run.speed_up], [run.accuracy]) for name, run in trained.items()}
    return Outcome(rows, Plot("speed-up over Full", "accuracy in %", series), verdict, measured(trained))


# --- Waits -----------------------------------------------------------------------------------------------------------

EVERY_TENTH, OVERLAP = "every 10th step", "every 10th step, with overlap"
PERIODS = {
    EVERY_TENTH: "group_average:4",
    "every 20th step": "group_average:4,period=20",
    "every 40th step": "group_average:4,period=40",
    "no average of all ranks": "group_average:4,period=none",
    "every 10th step, without waiting": "wait_avoiding:4",
    "every 20th step, with overlap": "group_average:4,period=20,overlap=gradient",
    OVERLAP: "group_average:4,overlap=gradient",
}
TWICE = ", at twice the rate"


def waits(job: Job) -> Outcome:
    """What the averages of all ranks cost, for which WAGMA-SGD waits, beside D-PSGD, which has none."""
    arms = {FULL_NAME: FULL, "D-PSGD": Arm("d_psgd")} | {name: Arm(exchange) for name, exchange in PERIODS.items()}
    for name in (FULL_NAME, "D-PSGD", EVERY_TENTH, OVERLAP):
        arms[f"{name}{TWICE}"] = replace(arms[name], times_rate=2.0)
    trained = _train(job, arms, replace(IMAGES, steps=job.choose(IMAGES.steps, 8)))
    rows = []
    for name, run in trained.items():
        rows.append(Row(f"{name}: speed-up over Full", "", run.speed_up, "measured"))
        rows.append(Row(f"{name}: accuracy in %", "", run.accuracy, "measured"))
    rows += limit_rows(trained)
    d_psgd, plain = trained["D-PSGD"], trained[EVERY_TENTH]
    fastest = max(PERIODS, key=lambda name: trained[name].speed_up)
    gains = "; ".join(
        f"{name}: {trained[name].speed_up / plain.speed_up:.2f}" for name in PERIODS if name != EVERY_TENTH
    )
    ahead = [name for name in PERIODS if trained[name].speed_up >= d_psgd.speed_up]
    doubled = [f"{trained[name].accuracy:.1f}" for name in trained if name.endswith(TWICE)]
    from_full = {name: f"{run.accuracy - trained[FULL_NAME].accuracy:+.1f}" for name, run in trained.items()}
    verdict = (
        f"Groups of 4 with an average of all ranks every 10th step are {plain.speed_up:.2f} times as fast as Full. Their other "
        f"forms, over this one: {gains}. D-PSGD waits for neighbours only, and is {d_psgd.speed_up:.2f} times as fast as Full. At "
        f"least as fast as D-PSGD: {'; '.join(ahead) or 'none'}. The fastest form ({fastest}) differs from Full's accuracy by "
        f"{from_full[fastest]} points, and D-PSGD by {from_full['D-PSGD']} (deviation over the seeds up to {_deviation(trained):.1f}). "
        "At twice the learning rate the accuracies of Full, D-PSGD, averages every 10th step, and the same with overlap are "
        f"{', '.join(doubled)} %."
    )
    series = {name: ([run.speed_up], [run.accuracy]) for name, run in trained.items()}
    return Outcome(rows, Plot("speed-up over Full", "accuracy in %", series), verdict, measured(trained))


# --- Ablations -------------------------------------------------------------------------------------------------------

ALL_SELDOM, FIXED = "1: only the average of all, every 10th step", "2: groups that never change"
ALL, SMALLER = "3: one group of all ranks", "4: smaller groups, of 2"
ABLATIONS = {
    FULL_NAME: FULL,
    WAGMA: Arm("group_average:4"),
    ALL_SELDOM: Arm("local_sgd"),
    FIXED: Arm("fixed_groups:4"),
    ALL: Arm("group_average:8"),
    SMALLER: Arm("group_average:2"),
}
# Accuracy on ImageNet with 64 ranks and groups of 8, and BLEU with 16 and groups of 4.
ABLATIONS_PAPER = {
    FULL_NAME: "75.9; 25.72",
    WAGMA: "75.3; 26.12",
    ALL_SELDOM: "68.5",
    FIXED: "72.2; 24.79",
    ALL: "no better",
    SMALLER: "72.8; 24.53",
}
SIMULATED_RANKS, TEXT_RANKS = 64, 16
BUTTERFLY = "recursive_doubling"  # by which the paper's groups reduce: log S messages of the whole model


def ablations(job: Job) -> Outcome:
    """The four of section 5.2: on digits, where two random ranks are late in each step."""
    # In a smoke run, past the second average over all ranks, so that there is a distance.
    trained = _train(job, ABLATIONS, replace(IMAGES, steps=job.choose(IMAGES.steps, 21)))
    rows = []
    for name, run in trained.items():
        rows.append(Row(f"{name}: accuracy in %", ABLATIONS_PAPER[name], run.accuracy, "measured"))
        if run.distance is not None:
            rows.append(Row(f"{name}: distance of replicas from their mean", "", run.distance, "measured"))
        rows.append(Row(f"{name}: speed-up over Full", "", run.speed_up, "measured"))
    of_groups = _groups(job)
    costs: dict[str, list[float]] = {each.paper: [] for each in of_groups}
    for (name, links), algorithm in itertools.product(rivals.LINKS.items(), (rivals.ALGORITHM, BUTTERFLY)):
        for each in of_groups:
            cost = each.cost_of_one(links, algorithm)
            costs[each.paper].append(cost)
            what = f"{each.network}, one group of {each.delays.shape[1]} over groups of {each.size}"
            where = f"{name}, {algorithm.replace('_', ' ')}"
            rows.append(Row(f"{what}, {where}: time of a step", each.paper, cost, "simulated"))
    plot = Plot(
        "speed-up over Full",
        "distance of replicas from their mean",
        {name: ([run.speed_up], [run.distance]) for name, run in trained.items() if run.distance is not None},
    )
    return Outcome(rows, plot, _verdict(trained, costs), measured(trained))


def _verdict(trained: dict[str, Trained], costs: dict[str, list[float]]) -> str:
    """Ablation by ablation: what the paper says, and what came out."""
    mine, deviation = trained[WAGMA], _deviation(trained)
    distances = {name: run.distance for name, run in trained.items() if run.distance is not None}
    parts = []
    for name, claim in (
        (ALL_SELDOM, "loses 6.8 points"),
        (FIXED, "loses 3.1 points"),
        (SMALLER, "loses 2.5 points"),
        (ALL, "is no better, and slower"),
    ):
        lost = mine.accuracy - trained[name].accuracy
        apart = distances[name] / distances[WAGMA] if distances[WAGMA] else math.inf  # in a smoke run
        farther = f", and its replicas are {apart:.1f} times as far apart"
        shown = "is less accurate here, too" if lost > deviation else "is as accurate here"
        if lost < -deviation:
            shown = "is more accurate here"
        parts.append(
            f"{name.partition(': ')[2]} {claim} there, and {shown} ({-lost:+.1f} points, deviation over the seeds up to "
            f"{deviation:.1f}){farther}"
        )
    slower = "; ".join(
        f"{min(found):.2f} to {max(found):.2f} where the paper has {paper}" for paper, found in costs.items()
    )
    return (
        f"{'. '.join(part[0].upper() + part[1:] for part in parts)}. One group of all ranks takes, simulated, times as long a "
        f"step: {slower}; measured it is {trained[ALL].speed_up / mine.speed_up:.2f} times as fast as {WAGMA}."
    )


@dataclass(frozen=True)
class Groups:
    """A job whose ranks average in groups: what ablation 3 costs there.

    Attributes:
        network: that is trained.
        trace: of its step.
        delays: as in `horovod_partial.insight.simulate`.
        period: of the averages of all ranks.
        size: of the groups.
        paper: by how much longer a step takes there with one group of all ranks.
    """

    network: str
    trace: Trace
    delays: Floats
    period: int
    size: int
    paper: str

    def cost_of_one(self, links: Cluster, algorithm: str) -> float:
        """The time of a step with one group of all ranks, over that with groups."""
        groups, one = (
            seconds_of(GroupAverage(size, period=self.period), self.trace, self.delays, links, algorithm)
            for size in (self.size, self.delays.shape[1])
        )
        return one / groups


def _groups(job: Job) -> tuple[Groups, ...]:
    steps, least = job.choose(1_000, 20), TEXT_QUARTILES[0]
    late = RandomRanks(IMAGE_VICTIMS, IMAGE_DELAY).draw(steps, SIMULATED_RANKS, IMAGE_COMPUTE, seed=0)
    unequal = sentences(steps, TEXT_RANKS) - least
    return (
        Groups("ResNet-50", resnet50(IMAGE_COMPUTE), late, IMAGE_PERIOD, 8, "1.24"),
        Groups("Transformer", Trace.even(1, TEXT_BYTES, least, 0.0), unequal, TEXT_PERIOD, 4, "1.28"),
    )


def _train(job: Job, arms: dict[str, Arm], setting: Setting) -> dict[str, Trained]:
    return train_all(job, arms, setting, ranks=job.choose(8, 2), seeds=job.choose(3, 1))


def _deviation(trained: dict[str, Trained]) -> float:
    return max(run.deviation for run in trained.values())
