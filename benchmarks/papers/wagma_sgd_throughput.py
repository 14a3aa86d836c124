"""How fast WAGMA-SGD is, and on what: its Figs. 4, 6, 7, 9 and 10."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import rivals
from eager_sgd_throughput import measured_over_full, resnet50, seconds_of
from eager_sgd_times import histogram, waits
from experiment import Job, Outcome, Plot, Row
from numpy.typing import NDArray

from horovod_partial.insight.simulate import Cluster, LogNormal, RandomRanks, Trace
from horovod_partial.policies import GroupAverage

Floats = NDArray[np.float64]
NEIGHBOURS = "waiting for neighbours only"
OVERLAPPED = "WAGMA-SGD with overlap"


def gossip(work: Floats, links: Cluster, nbytes: float, neighbours: int) -> dict[str, float]:
    """Seconds of a step under rivals that average models: gossip as the paper has it, in step, and as designed."""
    sgp = f"SGP ({neighbours}n)"
    return {
        "local SGD": rivals.local_sgd(work, links, nbytes),
        "D-PSGD": rivals.d_psgd(work, links, nbytes, in_step=True),
        sgp: rivals.push_sum(work, links, nbytes, neighbours, in_step=True),
        "AD-PSGD": rivals.ad_psgd(work, links, nbytes),
        f"D-PSGD, {NEIGHBOURS}": rivals.d_psgd(work, links, nbytes),
        f"{sgp}, {NEIGHBOURS}": rivals.push_sum(work, links, nbytes, neighbours),
    }


def over_rivals(seconds: dict[str, float], paper: dict[str, str], where: str) -> list[Row]:
    """WAGMA-SGD's throughput over that of each rival."""
    return [
        Row(f"WAGMA-SGD over {name}, {where}", paper.get(name, ""), taken / seconds["WAGMA-SGD"], "simulated")
        for name, taken in seconds.items()
        if name != "WAGMA-SGD"
    ] + [
        Row(
            f"{OVERLAPPED} over D-PSGD, {NEIGHBOURS}, {where}",
            "",
            seconds[f"D-PSGD, {NEIGHBOURS}"] / seconds[OVERLAPPED],
            "simulated",
        )
    ]


def least_over(seconds: dict[str, float], names: Sequence[str]) -> float:
    """WAGMA-SGD's throughput over that of the fastest of these."""
    return min(seconds[name] for name in names) / seconds["WAGMA-SGD"]


def rates(by_ranks: dict[int, dict[str, float]], of_step: float) -> dict[str, tuple[list[float], list[float]]]:
    """Lines of a plot: what all ranks do by second, where each does so much in a step."""
    return {
        name: (
            [float(ranks) for ranks in by_ranks],
            [ranks * of_step / seconds[name] for ranks, seconds in by_ranks.items()],
        )
        for name in next(iter(by_ranks.values()))
    }


# --- Fig. 4 ----------------------------------------------------------------------------------------------------------

IMAGE_RANKS = (4, 16, 64, 256)
IMAGE_BATCH = 128
IMAGE_COMPUTE = 256 * IMAGE_BATCH / 53_300  # seconds: the ideal throughput of 256 nodes is read off the plot
IMAGE_VICTIMS, IMAGE_DELAY, IMAGE_PERIOD = 2, 0.32, 10
IMAGE_PAPER = {
    64: {"local SGD": "1.25", "Allreduce-SGD": "1.26", "D-PSGD": "1.23", "SGP (2n)": "1.25", "eager-SGD": "1.13"}
    | {"AD-PSGD": "~0.87"},
    256: {"local SGD": "1.37", "Allreduce-SGD": "~1.37", "D-PSGD": "~1.24", "SGP (2n)": "~1.22", "eager-SGD": "~1.37"}
    | {"AD-PSGD": "~0.84"},
}
LEAST_IN_STEP = {64: 1.23, 256: 1.22}  # of these, over the rivals that keep in step
IN_STEP = ("local SGD", "Allreduce-SGD", "D-PSGD", "SGP (2n)")
NEIGHBOURLY = (f"D-PSGD, {NEIGHBOURS}", f"SGP (2n), {NEIGHBOURS}")
EVEN_PAPER = {"local SGD": 1.52, "D-PSGD": 1.57, "SGP (2n)": 1.51, "AD-PSGD": 1.61, "WAGMA-SGD": 1.55}  # steps/s
# Names in harness/exchanges.py, and labels.
IMAGE_MEASURED = {
    "group_average:2": "WAGMA-SGD, groups of 2",
    "group_average:4": "WAGMA-SGD, groups of 4",
    "group_average:4,overlap=gradient": "WAGMA-SGD, groups of 4, with overlap",
    "eager_sgd:majority": "eager-SGD (majority)",
    "eager_sgd:solo": "eager-SGD (solo)",
    "d_psgd": "D-PSGD",
    "push_sum:2": "SGP (2n)",
    "push_sum:2:overlap": "SGP (2n), overlapped",
    "ad_psgd": "AD-PSGD",
}


def images(job: Job) -> Outcome:
    """Fig. 4: ResNet-50, in whose steps two ranks are late; and without delays."""
    rows = []
    claims = []
    short: list[str] = []
    plot = Plot("ranks", "", {})
    for name, links in rivals.LINKS.items():
        by_ranks = {ranks: _images(job, ranks, links, IMAGE_DELAY) for ranks in IMAGE_RANKS}
        for ranks, paper in IMAGE_PAPER.items():
            rows += over_rivals(by_ranks[ranks], paper, f"{ranks} ranks, {name}")
            waiting, eager, neighbourly = (
                least_over(by_ranks[ranks], names) for names in (IN_STEP, ["eager-SGD"], NEIGHBOURLY)
            )
            where = f"{ranks} ranks on {name}"
            short += [where] if waiting < LEAST_IN_STEP[ranks] else []
            claims.append(f"{waiting:.2f}, {eager:.2f} and {neighbourly:.2f} with {where}")
        even = _images(job, 64, links, 0.0)
        for rival, paper_rate in EVEN_PAPER.items():
            rows.append(
                Row(f"{rival}, no delay, 64 ranks, {name}: steps/s", f"{paper_rate:.2f}", 1 / even[rival], "simulated")
            )
        if not plot.series:
            series = rates(by_ranks, IMAGE_BATCH)
            plot = Plot("ranks", f"images a second, {name}'s links", series, log_x=True, log_y=True)
    ranks = job.choose(8, 2)
    measured = measured_over_full(job, list(IMAGE_MEASURED), IMAGE_VICTIMS, IMAGE_DELAY / IMAGE_COMPUTE)
    rows += measured.rows(IMAGE_MEASURED, f"{ranks} ranks")
    over_full = measured.over_full
    wagma = over_full["group_average:4"]
    ahead = [label for name, label in IMAGE_MEASURED.items() if over_full[name] < wagma]
    behind = [label for name, label in IMAGE_MEASURED.items() if over_full[name] > wagma]
    verdict = (
        "WAGMA-SGD's throughput over the fastest rival that keeps in step, over eager-SGD, and over gossip that "
        f"waits for neighbours only: {'; '.join(claims)}. The paper has 1.23 and 1.13 with 64 ranks, ~1.22 and ~1.37 "
        f"with 256, and not the third; the first falls short of it with {', '.join(short) or 'none'}. Here eager-SGD "
        "sends gradients during the compute, and plain WAGMA-SGD sends a model after it. Measured with "
        f"{ranks} ranks, WAGMA-SGD in groups of 4 without overlap is faster than {'; '.join(ahead) or 'none'}, and slower than "
        f"{'; '.join(behind) or 'none'}."
    )
    return Outcome(rows, plot, verdict, measured.rates)


def _images(job: Job, ranks: int, links: Cluster, delay: float) -> dict[str, float]:
    trace = resnet50(IMAGE_COMPUTE)
    delays = RandomRanks(IMAGE_VICTIMS, delay).draw(job.choose(1_000, 20), ranks, IMAGE_COMPUTE, seed=0)
    return gossip(IMAGE_COMPUTE + delays, links, trace.nbytes, 2) | {
        "Allreduce-SGD": seconds_of("full", trace, delays, links),
        "eager-SGD": seconds_of("solo", trace, delays, links),
        "WAGMA-SGD": seconds_of(GroupAverage(period=IMAGE_PERIOD), trace, delays, links),
        OVERLAPPED: seconds_of(GroupAverage(period=IMAGE_PERIOD, overlap="gradient"), trace, delays, links),
    }


# --- Figs. 6 and 7 ---------------------------------------------------------------------------------------------------

TEXT_RANKS = (4, 16, 64)
TEXT_BYTES = 4 * 61_362_176
TEXT_PERIOD = 8
TEXT_QUARTILES = (0.05, 0.19, 0.26, 0.36, 0.70)  # seconds: least, quartiles, greatest, read off the plot
TEXT_PAPER = {
    # With 16 ranks: of the minutes that ten epochs took (Fig. 8). With 64: of the throughputs, read off the plot.
    16: {"local SGD": "1.39", "Allreduce-SGD": "~1.80", "D-PSGD": "~1.38", "AD-PSGD": "1.10", "SGP (1n)": "~1.34"},
    64: {"local SGD": "~1.7", "Allreduce-SGD": "~3.5", "D-PSGD": "~1.3", "AD-PSGD": "~0.88", "SGP (1n)": "~1.2"},
}


def sentences(steps: int, ranks: int) -> Floats:
    """Seconds of a Transformer's steps: between the figures of the plot all times are as likely."""
    return np.interp(np.random.default_rng(0).random((steps, ranks)), np.linspace(0, 1, 5), TEXT_QUARTILES)


def sentence_times(job: Job) -> Outcome:
    """Fig. 6: how long a Transformer takes for batches of sentences."""
    drawn = sentences(20_000, 1).ravel()
    what = "Transformer's batch in s"
    names = ("least", "first quartile", "median", "third quartile", "greatest")
    rows = [
        Row(f"{what}: {name}", f"~{paper:.2f}", float(ours), "computed")
        for name, paper, ours in zip(names, TEXT_QUARTILES, np.quantile(drawn, np.linspace(0, 1, 5)), strict=True)
    ]
    rows += [Row(f"{what}: mean", "", float(drawn.mean()), "computed"), *waits(what, drawn, (16, 64))]
    verdict = "The five figures are those of the plot by construction; what follows from them is how long ranks wait."
    return Outcome(rows, histogram({"drawn": drawn}, "batch in s"), verdict)


def text(job: Job) -> Outcome:
    """Fig. 7: a Transformer on batches of sentences, with as many ranks as the paper had."""
    rows = []
    shares: dict[str, float] = {}
    least: dict[str, tuple[float, float, float]] = {}
    plot = Plot("ranks", "", {})
    for name, links in rivals.LINKS.items():
        by_ranks = {ranks: _text(job, ranks, links) for ranks in TEXT_RANKS}
        for ranks, paper in TEXT_PAPER.items():
            rows += over_rivals(by_ranks[ranks], paper, f"{ranks} ranks, {name}")
            in_step = [one for one in paper if one != "AD-PSGD"]
            neighbourly = [f"{one}, {NEIGHBOURS}" for one in ("D-PSGD", "SGP (1n)")]
            least[f"{ranks} ranks on {name}"] = (
                least_over(by_ranks[ranks], in_step),
                least_over(by_ranks[ranks], ["AD-PSGD"]),
                least_over(by_ranks[ranks], neighbourly),
            )
        mean = float(sentences(20_000, 1).mean())
        shares[name] = mean / by_ranks[64]["WAGMA-SGD"]
        rows.append(Row(f"WAGMA-SGD, 64 ranks, {name}: of the ideal throughput", "~0.58", shares[name], "simulated"))
        if not plot.series:
            plot = Plot("ranks", f"batches by second, {name}'s links", rates(by_ranks, 1), log_x=True, log_y=True)
    return Outcome(rows, plot, text_verdict(least, shares))


def text_verdict(least: dict[str, tuple[float, float, float]], shares: dict[str, float]) -> str:
    """What came out: throughputs over rivals of three kinds by numbers of ranks, and shares of the ideal by links."""
    ratios = "; ".join(f"{kept:.2f}, {ad:.2f} and {near:.2f} with {where}" for where, (kept, ad, near) in least.items())
    return (
        "WAGMA-SGD's throughput over the fastest rival that keeps in step, over AD-PSGD, and over gossip that waits for "
        f"neighbours only: {ratios} (the paper: ~1.34 and 1.10 with 16 ranks, ~1.2 and ~0.88 with 64, and not the third). "
        f"With 64 ranks it has "
        f"{', '.join(f'{share:.0%} of the ideal on {name}' for name, share in shares.items())} (the paper: ~58 %)."
    )


def _text(job: Job, ranks: int, links: Cluster) -> dict[str, float]:
    work = sentences(job.choose(1_000, 20), ranks)
    return gossip(work, links, TEXT_BYTES, 1) | _ours(work, TEXT_QUARTILES[0], TEXT_BYTES, TEXT_PERIOD, links)


def _ours(work: Floats, least: float, nbytes: int, period: int, links: Cluster) -> dict[str, float]:
    """Seconds of a step of unequal work; the gradients travel after it, in one message."""
    trace = Trace.even(1, nbytes, least, 0.0)
    return {
        "Allreduce-SGD": seconds_of("full", trace, work - least, links),
        "WAGMA-SGD": seconds_of(GroupAverage(period=period), trace, work - least, links),
        OVERLAPPED: seconds_of(GroupAverage(period=period, overlap="gradient"), trace, work - least, links),
    }


# --- Figs. 9 and 10 --------------------------------------------------------------------------------------------------

EXPERIENCE_RANKS = (16, 64, 256, 1_024)
EXPERIENCE_STEPS = 2 * 128  # of the environments, that a rank collects for one of its own
EXPERIENCE_BYTES = 4 * 8_476_421
EXPERIENCE_PERIOD = 8
COLLECTED = 5_000  # times, in the paper's figure
LEAST, MEDIAN, GREATEST = 1.7, 1.81, 43.5  # seconds; the paper tells that the median is below 2, and plots it there
# Above the least time, a log-normal distribution whose greatest value of so many is the paper's.
COLLECTING = LogNormal(
    MEDIAN - LEAST, math.log((GREATEST - LEAST) / (MEDIAN - LEAST)) / NormalDist().inv_cdf(1 - 1 / COLLECTED)
)
EXPERIENCE_PAPER = {"local SGD": "2.33", "D-PSGD": "1.88", "SGP (4n)": "2.10", "AD-PSGD": "~0.59"}
IDEAL = 1.0e5  # steps by second of 1,024 ranks without communication, read off the plot


def collecting(steps: int, ranks: int) -> Floats:
    """Seconds in which ranks collect experience, none longer than the paper's longest."""
    return np.minimum(LEAST + COLLECTING.draw(steps, ranks, 0.0, seed=0), GREATEST)


def collection_times(job: Job) -> Outcome:
    """Fig. 9: how long it takes to collect experience in environments that differ."""
    drawn = collecting(COLLECTED, 1).ravel()
    what = "collecting experience, s"
    figures = [
        ("least", "1.7", drawn.min()),
        ("first quartile", "~1.78", np.quantile(drawn, 0.25)),
        ("median", "below 2", np.median(drawn)),
        ("third quartile", "~1.88", np.quantile(drawn, 0.75)),
        ("greatest", "43.5", drawn.max()),
        ("mean", "", drawn.mean()),
    ]
    rows = [Row(f"{what}: {name}", paper, float(ours), "computed") for name, paper, ours in figures]
    rows += waits(what, drawn, (16, 1_024))
    verdict = (
        "A log-normal distribution through the paper's least time, median and greatest time has its third quartile "
        f"at {np.quantile(drawn, 0.75):.2f} s, where the plot has ~1.88: the paper's times are closer together, and "
        "have a tail of their own."
    )
    return Outcome(rows, histogram({"drawn": drawn}, "s"), verdict)


def experience(job: Job) -> Outcome:
    """Fig. 10: PPO, whose ranks collect experience for very different times."""
    learning = 1_024 * EXPERIENCE_STEPS / IDEAL - float(collecting(20_000, 1).mean())
    rows = []
    at_scale: dict[str, dict[str, float]] = {}
    plot = Plot("ranks", "", {})
    for name, links in rivals.LINKS.items():
        by_ranks = {}
        for ranks in EXPERIENCE_RANKS[: job.choose(4, 2)]:
            work = learning + collecting(job.choose(400, 20), ranks)
            by_ranks[ranks] = gossip(work, links, EXPERIENCE_BYTES, 4) | _ours(
                work, LEAST + learning, EXPERIENCE_BYTES, EXPERIENCE_PERIOD, links
            )
        largest = max(by_ranks)
        at_scale[name] = by_ranks[largest]
        rows += over_rivals(by_ranks[largest], EXPERIENCE_PAPER, f"{largest:,} ranks, {name}")
        for arm, throughput in (("WAGMA-SGD", "~4.9e4"), ("local SGD", "~2.1e4"), ("AD-PSGD", "~8.2e4")):
            ours = largest * EXPERIENCE_STEPS / by_ranks[largest][arm]
            rows.append(Row(f"{arm}, {largest:,} ranks, {name}: steps/s", throughput, ours, "simulated"))
        if not plot.series:
            series = rates(by_ranks, EXPERIENCE_STEPS)
            plot = Plot("ranks", f"steps of experience by second, {name}'s links", series, log_x=True, log_y=True)
    parts = [
        f"{name} {least_over(seconds, ('local SGD', 'D-PSGD', 'SGP (4n)')):.2f}, and over gossip that waits for "
        f"neighbours only {least_over(seconds, (f'D-PSGD, {NEIGHBOURS}', f'SGP (4n), {NEIGHBOURS}')):.2f}"
        for name, seconds in at_scale.items()
    ]
    local = next(iter(at_scale.values()))["local SGD"]
    verdict = (
        f"WAGMA-SGD's throughput over that of the fastest rival which keeps in step: {'; '.join(parts)} (the paper: "
        f"1.88, and not the second). A late rank takes its result at once, and only every {EXPERIENCE_PERIOD}th round "
        f"waits for it. Local SGD takes {local:.1f} s for a step, and {1_024 * EXPERIENCE_STEPS / 2.1e4:.1f} in the "
        "paper with 1,024 ranks: where ours is longer, the times drawn have a longer tail, which flatters all that "
        "do not wait."
    )
    return Outcome(rows, plot, verdict)
