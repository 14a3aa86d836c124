"""How unequal steps are: eager-SGD's Figs. 2 to 4, drawn from the statistics that it gives.

A figure's least value, mean and standard deviation are taken as they are printed, and a log-normal distribution above
the least one is fitted to them. So these agree by construction; what tells how well the shape fits is the greatest
value. The batches of Fig. 2 are not drawn but made, of the drawn videos.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from experiment import Job, Outcome, Plot, Row
from numpy.typing import NDArray

from horovod_partial.insight.simulate import LogNormal

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Published:
    """What the paper tells of a distribution.

    Attributes:
        what: was measured, and in which unit.
        number: of the measurements.
        least: and so on, in that unit.
    """

    what: str
    number: int
    least: float
    greatest: float
    mean: float
    deviation: float

    def draw(self, number: int, seed: int = 0) -> Floats:
        """So many values of a log-normal distribution above the least one, with the mean and deviation of the paper."""
        return self.least + above(self.mean - self.least, self.deviation).draw(number, 1, 0.0, seed).ravel()

    def rows(self, drawn: Floats) -> list[Row]:
        """The paper's statistics beside those of drawn values."""
        figures = [
            ("mean", self.mean, drawn.mean()),
            ("standard deviation", self.deviation, drawn.std()),
            ("least", self.least, drawn.min()),
            ("greatest", self.greatest, drawn.max()),
        ]
        return [Row(f"{self.what}: {name}", f"{paper:,g}", float(ours), "computed") for name, paper, ours in figures]


def above(mean: float, deviation: float) -> LogNormal:
    """Delays with that mean and standard deviation."""
    variance = math.log(1 + (deviation / mean) ** 2)
    return LogNormal(mean * math.exp(-variance / 2), math.sqrt(variance))


VIDEOS = Published("frames of a video", 9_537, 29, 1_776, 187, 97)
LSTM = Published("LSTM's batch in ms", 1_192, 201, 3_410, 1_235, 706)
TRANSFORMER = Published("Transformer's batch in ms", 20_653, 179, 3_482, 475, 144)
CLOUD = Published(
    "ResNet-50's batch in ms", 25_022, 399, 1_892, 454, 116
)  # 5 epochs of 1,281,167 images in batches of 256
BATCH = 16  # of the LSTM


def lengths(job: Job) -> Outcome:
    """Fig. 2: the videos of UCF101, and the batches of an LSTM on them."""
    videos = VIDEOS.draw(VIDEOS.number)
    # Two epochs of batches of videos of similar length, each as long as its longest.
    in_order = np.sort(videos)[: VIDEOS.number // BATCH * BATCH]
    batches = np.tile(in_order.reshape(-1, BATCH).max(axis=1), 2)
    batches *= LSTM.mean / batches.mean()
    rows = VIDEOS.rows(videos) + LSTM.rows(batches) + waits(LSTM.what, batches, (8,))
    spread = batches.std() / batches.mean()
    published = LSTM.deviation / LSTM.mean
    verdict = (
        f"The time of a batch in proportion to its longest video has a deviation of {spread:.0%} of the mean, where "
        f"the paper measured {published:.0%}: the lengths explain {'most' if spread > 0.7 * published else 'part'} of "
        "the imbalance."
    )
    return Outcome(rows, histogram({"drawn": batches}, "batch in ms"), verdict)


def language(job: Job) -> Outcome:
    """Fig. 3: a Transformer on WMT16."""
    return _drawn(TRANSFORMER)


def cloud(job: Job) -> Outcome:
    """Fig. 4: ResNet-50 on machines of a cloud."""
    return _drawn(CLOUD)


def _drawn(published: Published) -> Outcome:
    drawn = published.draw(published.number)
    rows = published.rows(drawn) + waits(published.what, drawn, (8, 64))
    verdict = (
        f"A log-normal distribution with the paper's mean and deviation has a greatest value of {drawn.max():,.0f} ms "
        f"in as many batches, where the paper has {published.greatest:,.0f} ms."
    )
    return Outcome(rows, histogram({"drawn": drawn}, "batch in ms"), verdict)


def waits(what: str, drawn: Floats, ranks: Sequence[int]) -> list[Row]:
    """By how much ranks are held up that wait for the slowest in each step."""
    rows = []
    for count in ranks:
        steps = np.random.default_rng(1).choice(drawn, (2_000, count))
        ratio = float(steps.max(axis=1).mean() / drawn.mean())
        rows.append(Row(f"{what}: slowest of {count} ranks over the mean", "", ratio, "computed"))
    return rows


def histogram(drawn: dict[str, Floats], xlabel: str) -> Plot:
    """Shares of the values, in 60 bins up to the 99.5th percentile."""
    series = {}
    for label, values in drawn.items():
        counts, edges = np.histogram(values, 60, (float(values.min()), float(np.quantile(values, 0.995))))
        series[label] = (((edges[:-1] + edges[1:]) / 2).tolist(), (counts / len(values)).tolist())
    return Plot(xlabel, "share", series)
