"""WP-SGD's cluster of 20 unequal nodes, each training a sparse support-vector machine: all in one process.

Nodes take real steps on generated rows; only their times are modelled, with a step of the fastest node as the unit. Speeds
are made from table 1 and section 6.2.1: a node with an E5-2640 has 0.6 times the mean speed of the others ("50% to 70%"),
which differ by the clocks that are printed. A step passes over the model, 16 bytes a weight at 10 GB/s (our assumption), and
an average of all nodes is a ring over the printed 1,000 Mb/s: together 76 steps, whatever the size of the model.

In D&M-based WP-SGD each node has two workers, which compute with the model of one update ago (Algorithm 3 with a delay of
one), and the nodes average when the fastest has taken 1,000 steps (Algorithm 5). Its check function (Algorithm 4) is left
out, see the refusals; so are parallel workers in the others: every method takes as many steps a second on a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import harness
import numpy as np
from experiment import Job, Outcome, Plot, Row
from numpy.typing import NDArray

from horovod_partial import _core
from horovod_partial.exchange.wp_sgd import average_is_useful, estimate_contraction

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SPEEDS = (1.0, *[0.85] * 4, *[0.67] * 8, *[0.45] * 7)  # E3-1225, E5-2680, E5-2660, E5-2640
PERIOD = 1_000  # steps of the fastest node, in D&M-based WP-SGD
AVERAGE = (2 * 19 / 20 * 8 / 125e6) / (16 / 10e9)  # steps, that an average of all nodes takes

# --- Data ------------------------------------------------------------------------------------------------------------

FIELDS, VALUES = 42, 499
DIMENSIONS = FIELDS * VALUES  # real-sim's
NON_ZEROS, SPREAD = 29, 0.3  # of a row: median, and sigma of a log-normal
NOISE = 0.5
PART = 3_600  # rows of a node
TESTS = 1_000  # rows


@dataclass(frozen=True)
class Rows:
    """Binary rows, each as the dimensions that are not zero, filled up with DIMENSIONS; and their labels, 1 or -1."""

    dimensions: Integers
    labels: Floats

    @classmethod
    def make(cls, count: int, seed: int) -> Rows:
        """Rows with a value in each of their first fields, which follow a power law, and labels by a noisy plane."""
        generator = np.random.default_rng((seed, 1))
        lengths = np.clip(NON_ZEROS * np.exp(SPREAD * generator.normal(size=count)), 1, FIELDS).astype(np.int64)
        values = (VALUES ** generator.random((count, FIELDS))).astype(np.int64) - 1
        dimensions = np.arange(FIELDS) * VALUES + values
        dimensions[np.arange(FIELDS) >= lengths[:, None]] = DIMENSIONS
        plane = np.append(np.random.default_rng(0).normal(size=DIMENSIONS), 0.0)
        above = plane[dimensions].sum(axis=1) / np.sqrt(lengths) + NOISE * generator.normal(size=count) > 0
        return cls(dimensions, np.where(above, 1.0, -1.0))


@dataclass(frozen=True)
class Setting:
    """One of the paper's two runs.

    Attributes:
        name: of the data set that stands behind it.
        regularisation: lambda.
        rate: eta.
        start: all weights at the start.
        contraction: r, as printed.
        steps: of the fastest node.
        every: steps between two looks at the models, a multiple of PERIOD.
    """

    name: str
    regularisation: float
    rate: float
    start: float
    contraction: float
    steps: int
    every: int

    @property
    def bound(self) -> float:
        """The largest r for which the theory holds."""
        return 1 - self.regularisation * self.rate


# The steps after which the sequential loss is about as far down as at the end of figure 6; and well into figure 9.
KDD = Setting("KDD 2010", 0.01, 1e-4, 4.0, 0.99999, 300_000, 25_000)
REAL_SIM = Setting("real-sim", 0.001, 0.1, 100.0, 0.99999, 24_000, 2_000)


# --- Nodes -----------------------------------------------------------------------------------------------------------


class Nodes:
    """Models of nodes, each a row; the factor by which regularisation has shrunk one is kept apart."""

    def __init__(self, setting: Setting, data: Rows, count: int) -> None:
        self._data = data
        self._setting = setting
        self._models = np.full((count, DIMENSIONS + 1), setting.start)
        self._models[:, DIMENSIONS] = 0.0
        self._scales = np.ones(count)

    def pulls(self, nodes: Integers, rows: Integers) -> Floats:
        """What a step on a row of its own adds to each node's weights of the row: 0 where the margin is kept."""
        margins = self._scales[nodes] * self._models[nodes[:, None], self._data.dimensions[rows]].sum(axis=1)
        labels = self._data.labels[rows]
        return np.where(labels * margins < 1, self._setting.rate * labels, 0.0)

    def step(self, nodes: Integers, rows: Integers, pulls: Floats) -> None:
        self._scales[nodes] *= self._setting.bound
        self._models[nodes[:, None], self._data.dimensions[rows]] += (pulls / self._scales[nodes])[:, None]
        self._models[nodes, DIMENSIONS] = 0.0

    def average(self, weights: Sequence[float]) -> None:
        self._models[:] = (np.array(weights) * self._scales) @ self._models
        self._scales[:] = 1.0

    def margins(self, node: int, tests: Rows) -> Floats:
        return self._scales[node] * self._models[node, tests.dimensions].sum(axis=1)


def hinge(margins: Floats, tests: Rows) -> float:
    return float(np.maximum(0, 1 - tests.labels * margins).mean())


class Race:
    """The methods on one data set: their losses after so many steps of the fastest node.

    Every node draws from its own part of the rows, and takes the same steps under every method, as far as it comes.
    """

    def __init__(self, setting: Setting, speeds: Sequence[float], seed: int = 0) -> None:
        self.setting = setting
        self.speeds = np.array(speeds)
        self.looks = list(range(setting.every, setting.steps + 1, setting.every))
        self.tests = Rows.make(TESTS, 1_000 + seed)
        nodes = len(speeds)
        self._data = Rows.make(nodes * PART, seed)
        drawn = np.random.default_rng((seed, 2)).integers(PART, size=(setting.steps, nodes))
        self._drawn = drawn + PART * np.arange(nodes)

    def taken(self, look: int) -> list[int]:
        """Steps of each node when the fastest has taken `look`."""
        return np.floor(look * self.speeds + 1e-9).astype(int).tolist()

    def alone(self) -> tuple[list[Floats], list[Floats]]:
        """Margins of all nodes at each look: after as many steps as the fastest, and after their own."""
        nodes = Nodes(self.setting, self._data, len(self.speeds))
        every = np.arange(len(self.speeds))
        wanted: dict[int, set[int]] = {look: set(every.tolist()) for look in self.looks}
        for look in self.looks:
            for node, steps in enumerate(self.taken(look)):
                wanted.setdefault(steps, set()).add(node)
        found: dict[tuple[int, int], Floats] = {}
        for step, rows in enumerate(self._drawn, start=1):
            nodes.step(every, rows, nodes.pulls(every, rows))
            for node in wanted.get(step, ()):
                found[step, node] = nodes.margins(node, self.tests)
        even = [np.array([found[look, node] for node in range(len(every))]) for look in self.looks]
        uneven = [np.array([found[steps, node] for node, steps in enumerate(self.taken(look))]) for look in self.looks]
        return even, uneven

    def mini_batch(self) -> list[float]:
        """Losses of one model whose steps have the mean gradient of all nodes."""
        model = np.full(DIMENSIONS + 1, self.setting.start)
        model[DIMENSIONS] = 0.0
        scale = 1.0
        losses = []
        for step, rows in enumerate(self._drawn, start=1):
            dimensions, labels = self._data.dimensions[rows], self._data.labels[rows]
            margins = scale * model[dimensions].sum(axis=1)
            pulls = np.where(labels * margins < 1, self.setting.rate * labels, 0.0) / len(rows)
            scale *= self.setting.bound
            np.add.at(model, dimensions, (pulls / scale)[:, None])
            model[DIMENSIONS] = 0.0
            if step % self.setting.every == 0:
                losses.append(hinge(scale * model[self.tests.dimensions].sum(axis=1), self.tests))
        return losses

    def delayed(self, contraction: float, *, by_period: bool) -> list[float]:
        """Losses of D&M-based WP-SGD, whose weights count the delay over the whole run, or over each period."""
        count = len(self.speeds)
        nodes = Nodes(self.setting, self._data, count)
        taken = np.zeros(count, dtype=int)
        last_rows, last_pulls = np.zeros(count, dtype=int), np.zeros(count)  # of the gradient that is under way
        losses = []
        for step in range(1, self.setting.steps + 1):
            due = np.flatnonzero(np.floor(step * self.speeds + 1e-9) > taken)
            rows = self._drawn[taken[due], due]
            pulls = nodes.pulls(due, rows)
            nodes.step(due, last_rows[due], last_pulls[due])
            last_rows[due], last_pulls[due] = rows, pulls
            taken[due] += 1
            if step % PERIOD == 0:
                since = self.taken(step - PERIOD) if by_period else [0] * count
                nodes.average(_core.contraction_weights((taken - since).tolist(), contraction))
            if step % self.setting.every == 0:
                losses.append(hinge(nodes.margins(0, self.tests), self.tests))
        return losses

    def weighted(self, margins: list[Floats], contraction: float) -> list[float]:
        """Losses of the average of models with WP-SGD's weights; with a contraction of 1 of the plain one."""
        return [
            hinge(np.array(_core.contraction_weights(self.taken(look), contraction)) @ each, self.tests)
            for look, each in zip(self.looks, margins, strict=True)
        ]

    def useful(self, contraction: float) -> float:
        """The share of the looks at which the paper's test says that the average beats the fastest node (equation 24)."""
        useful = [average_is_useful(self.taken(look), contraction) for look in self.looks]
        return sum(useful) / len(useful)


# --- Figures 6 to 9 ---------------------------------------------------------------------------------------------------

SEQUENTIAL, MINI_BATCH, SIMUPARALLEL = "sequential", "mini-batch", "SimuParallel"
DIRECT, WP, DM = "direct average", "WP-SGD", "D&M"
BY_PERIOD = f"{DM}, delays by period"  # as in hvd.WeightedAverage; in plots it lies upon D&M's line
# What is printed of figures 7 and 9, from best to worst.
BY_ITERATION = {
    MINI_BATCH: "1st",
    DM: "2nd, close",
    SIMUPARALLEL: "3rd",
    WP: "close to 3rd",
    SEQUENTIAL: "about as 3rd",
    DIRECT: "worst",
}
# Losses over WP-SGD's at the ends of figures 6 and 8, read off.
BY_TIME = {
    KDD.name: {DM: "~0.90", SEQUENTIAL: "~1.02", SIMUPARALLEL: "~1.08", DIRECT: "~1.14", MINI_BATCH: "~1.47"},
    REAL_SIM.name: {DM: "~0.47", SIMUPARALLEL: "~1.09", MINI_BATCH: "~1.47"},
}
ORDER_BY_ITERATION = ((MINI_BATCH, DM), (DM, SIMUPARALLEL), (SIMUPARALLEL, WP), (WP, DIRECT), (SEQUENTIAL, DIRECT))
CLOSE_BY_ITERATION = ((DM, MINI_BATCH), (WP, SIMUPARALLEL), (SEQUENTIAL, SIMUPARALLEL))
TIE = 1.01  # a loss that is not smaller by more is no better
CLOSE = 1.1  # a loss that is larger by no more is close
SAME = 1e-5


def smaller(setting: Setting, job: Job) -> Setting:
    """The setting, or what is left of it in a smoke test."""
    if not job.smoke:
        return setting
    return replace(setting, steps=2 * PERIOD, every=PERIOD)


SEEDS = 3
Losses = dict[str, list[float]]  # by method, at each look


def of_seeds(run: Callable[[int], Losses], job: Job) -> list[Losses]:
    """What each seed gives; two processes run at a time."""
    with ProcessPoolExecutor(max_workers=2) as pool:
        return list(pool.map(run, range(job.choose(SEEDS, 1))))


def means(seeds: Sequence[Losses]) -> Losses:
    """The mean over the seeds at each look."""
    return {method: np.mean([losses[method] for losses in seeds], axis=0).tolist() for method in seeds[0]}


def deviations(last: Sequence[dict[str, float]], what: str) -> str:
    """A sentence: how much the last values of the methods differ between seeds. `what`: the name of these values."""
    most = max(harness.deviation([of[method] for of in last]) / last[0][method] for method in last[0])
    return (
        f"Means of {len(last)} seeds. The standard deviation of the {what} is at most {most:.1%} of the first seed's."
    )


def race(setting: Setting, seed: int) -> Losses:
    """Losses of all methods by iteration of the fastest node."""
    runs = Race(setting, SPEEDS, seed)
    even, uneven = runs.alone()
    losses = {
        SEQUENTIAL: [hinge(each[0], runs.tests) for each in even],
        MINI_BATCH: runs.mini_batch(),
        SIMUPARALLEL: [hinge(each.mean(axis=0), runs.tests) for each in even],
        DIRECT: runs.weighted(uneven, 1.0),
        WP: runs.weighted(uneven, setting.contraction),
        DM: runs.delayed(setting.contraction, by_period=False),
        BY_PERIOD: runs.delayed(setting.contraction, by_period=True),
    }
    if setting.contraction > setting.bound:  # so the largest that the theory allows is shown too
        losses[f"{WP}, r = {setting.bound:g}"] = runs.weighted(uneven, setting.bound)
        losses[f"{DM}, r = {setting.bound:g}"] = runs.delayed(setting.bound, by_period=False)
    return losses


def by_iteration(setting: Setting, job: Job) -> Outcome:
    """Figures 7 and 9: losses after so many steps of the fastest node."""
    setting = smaller(setting, job)
    runs, seeds = Race(setting, SPEEDS), of_seeds(partial(race, setting), job)
    losses = means(seeds)
    last = {method: values[-1] for method, values in losses.items()}
    rows = [
        Row(
            f"hinge loss after {setting.steps:,} steps of the fastest node: {method}",
            BY_ITERATION.get(method, ""),
            loss,
            "computed",
        )
        for method, loss in sorted(last.items(), key=lambda pair: pair[1])
    ]
    useful = runs.useful(setting.contraction)
    rows += tests_of_theory(setting, useful)
    steps = [float(look) for look in runs.looks]
    plot = Plot(
        "steps of the fastest node",
        "hinge loss",
        {method: (steps, ys) for method, ys in losses.items() if method != BY_PERIOD},
        log_y=True,
    )
    told = verdict(last, ORDER_BY_ITERATION, CLOSE_BY_ITERATION)
    ends = [{method: values[-1] for method, values in of.items()} for of in seeds]
    told += f" {deviations(ends, 'losses')}"
    if useful == 1 and last[WP] > last[SEQUENTIAL]:
        told += (
            f" Equation 24 calls the average useful at all looks, and its loss is {last[WP] / last[SEQUENTIAL]:.1f} times that "
            "of the fastest node alone."
        )
    return Outcome(rows, plot, told, {"steps": runs.looks, "losses of each seed": seeds})


def by_time(setting: Setting, job: Job) -> Outcome:
    """Figures 6 and 8: losses over time."""
    setting = smaller(setting, job)
    runs, seeds = Race(setting, SPEEDS), of_seeds(partial(race, setting), job)
    slowest = 1 / min(SPEEDS)
    duration = {MINI_BATCH: slowest + AVERAGE, SIMUPARALLEL: slowest, DM: 1 + AVERAGE / PERIOD}  # of an iteration
    begin = hinge(Nodes(setting, runs.tests, 1).margins(0, runs.tests), runs.tests)
    end = float(setting.steps)

    def curves(losses: Losses) -> dict[str, tuple[list[float], list[float]]]:
        times = {method: duration.get(method.partition(",")[0], 1.0) for method in losses}
        return {
            method: ([0.0, *(times[method] * look for look in runs.looks)], [begin, *values])
            for method, values in losses.items()
        }

    series = curves(means(seeds))
    last = {method: float(np.interp(end, *curve)) for method, curve in series.items()}
    ends = [{method: float(np.interp(end, *curve)) for method, curve in curves(losses).items()} for losses in seeds]
    claimed = BY_TIME[setting.name]
    rows = [
        Row(
            f"hinge loss over {WP}'s when the fastest node has taken {setting.steps:,} steps: {method}",
            "1" if method == WP else claimed.get(method, ""),
            loss / last[WP],
            "simulated",
        )
        for method, loss in sorted(last.items(), key=lambda pair: pair[1])
    ]
    rows.append(Row(f"hinge loss of {WP} then", "", last[WP], "simulated"))
    shown = {
        method: (
            [x for x in xs if x <= end] + [end],
            [y for x, y in zip(xs, ys, strict=True) if x <= end] + [last[method]],
        )
        for method, (xs, ys) in series.items()
        if method != BY_PERIOD
    }
    plot = Plot("time, in steps of the fastest node", "hinge loss", shown, log_y=True)
    told = f"{verdict(last, order_by_time(claimed))} {deviations(ends, 'losses')}"
    return Outcome(rows, plot, told, {"steps": runs.looks, "losses of each seed": seeds})


def order_by_time(read_off: dict[str, str]) -> list[tuple[str, str]]:
    """Which method is just ahead of which at the end of a figure, by losses over WP-SGD's."""
    losses = {WP: 1.0} | {method: float(text.removeprefix("~")) for method, text in read_off.items()}
    return list(pairwise(sorted(losses, key=losses.__getitem__)))


def tests_of_theory(setting: Setting, useful: float) -> list[Row]:
    """What the paper's statements ask for, in this setting: the share of the looks at which equation 24 holds, and lemma 4."""
    curvature = setting.rate * (setting.regularisation + FIELDS)  # at most FIELDS ones in a row
    return [
        Row("share of the looks at which equation 24 calls the average useful", "", useful, "computed"),
        Row(
            "eta (lambda + beta^2 c*), at most 1 for lemma 4, with the hinge's own slope of 1 as c* (its derivative jumps, so "
            "that it has no c*)",
            "",
            curvature,
            "computed",
        ),
    ]


def verdict(last: dict[str, float], ahead: Sequence[tuple[str, str]], close: Sequence[tuple[str, str]] = ()) -> str:
    """Which of the orders that the paper claims are so here.

    Args:
        last: losses, by method.
        ahead: methods that are ahead of others there.
        close: methods that are close to others there.
    """
    found = {f"{better} ahead of {worse}": last[worse] / last[better] > TIE for better, worse in ahead}
    found |= {f"{one} close to {other}": last[one] / last[other] <= CLOSE for one, other in close}
    held, broken = ([claim for claim, is_so in found.items() if is_so is wanted] for wanted in (True, False))
    told = f"{len(held)} of {len(found)} claimed orders hold"
    if held:
        told += f": {'; '.join(held)}"
    told += f". Not here: {'; '.join(broken)}." if broken else "."
    if MINI_BATCH in last and abs(last[SIMUPARALLEL] / last[MINI_BATCH] - 1) < SAME:
        told += (
            " SimuParallel and mini-batch are the same here: until its margin is kept, a row's gradient does not depend on the "
            "model, and what tells them apart cannot show."
        )
    return told


figure6, figure7 = partial(by_time, KDD), partial(by_iteration, KDD)
figure8, figure9 = partial(by_time, REAL_SIM), partial(by_iteration, REAL_SIM)


# --- Figure 10 --------------------------------------------------------------------------------------------------------

LATE = replace(REAL_SIM, steps=48_000)
LATE_ORDER = ((SIMUPARALLEL, SEQUENTIAL), (SIMUPARALLEL, WP), (WP, SEQUENTIAL), (WP, DIRECT))
LATE_CLOSE = ((WP, SIMUPARALLEL),)
CLUSTERS = {"10 nodes": sorted(SPEEDS, reverse=True)[::2], "40 nodes": [*SPEEDS, *SPEEDS]}


def figure10(job: Job) -> Outcome:
    """Real-sim with twice the nodes, and with half of them, late in the training."""
    setting = smaller(LATE, job)
    rows, series, order, measured = [], {}, [], {}
    for cluster, speeds in CLUSTERS.items():
        runs, seeds = Race(setting, speeds), of_seeds(partial(late_race, setting, speeds), job)
        measured[cluster] = {"steps": runs.looks, "losses of each seed": seeds}
        losses = means(seeds)
        key = len(runs.looks) // 2
        steps = [float(look) for look in runs.looks[key:]]
        for method, values in losses.items():
            series[method] = (steps, values[key:])  # of the larger cluster, which comes last
            paper = {SIMUPARALLEL: "best", WP: "close to best", DIRECT: "worst"}.get(method, "")
            rows.append(
                Row(f"hinge loss after {setting.steps:,} steps, {cluster}: {method}", paper, values[-1], "computed")
            )
        last = {method: values[-1] for method, values in losses.items()}
        ends = [{method: values[-1] for method, values in of.items()} for of in seeds]
        order.append(f"{cluster}: {verdict(last, LATE_ORDER, LATE_CLOSE)} {deviations(ends, 'losses')}")
    return Outcome(rows, Plot("steps of the fastest node", "hinge loss", series, log_y=True), " ".join(order), measured)


def late_race(setting: Setting, speeds: Sequence[float], seed: int) -> Losses:
    """Losses of the methods that the figure has."""
    runs = Race(setting, speeds, seed)
    even, uneven = runs.alone()
    return {
        SEQUENTIAL: [hinge(each[0], runs.tests) for each in even],
        SIMUPARALLEL: [hinge(each.mean(axis=0), runs.tests) for each in even],
        DIRECT: runs.weighted(uneven, 1.0),
        WP: runs.weighted(uneven, setting.contraction),
        f"{WP}, r = {setting.bound:g}": runs.weighted(uneven, setting.bound),
    }


# --- Figure 3 ---------------------------------------------------------------------------------------------------------


def figure3(job: Job) -> Outcome:
    """r, fitted to the losses of one node; hinge losses grow with the distance, and not with its square."""
    rows, series = [], {}
    for setting in (KDD, REAL_SIM):
        steps = job.choose(setting.steps, setting.every)
        runs = Race(replace(setting, steps=steps, every=steps // 60), SPEEDS[:1])
        even, _ = runs.alone()
        losses = [hinge(each[0], runs.tests) for each in even]
        fitted = estimate_contraction(losses, "linear") ** (1 / runs.setting.every)
        rows.append(Row(f"1 - r, {setting.name}", f"{1 - setting.contraction:.0e}", 1 - fitted, "computed"))
        rows.append(Row(f"1 - r by theory, at least lambda * eta, {setting.name}", "", 1 - setting.bound, "computed"))
        series[setting.name] = ([look / steps for look in runs.looks], [loss / losses[0] for loss in losses])
    kdd, _, real_sim, _ = (row.ours for row in rows)
    return Outcome(
        rows,
        Plot("share of the steps", "hinge loss, over that of the first look", series, log_y=True),
        f"The fit says 1 - {kdd:.1e} for KDD, and 1 - {real_sim:.1e} for real-sim. The paper takes 0.99999 for both.",
    )
