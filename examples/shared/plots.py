"""The plots of `digits_job.py` and of `examples/torch/sequence.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

# Okabe and Ito's colours, which colour-blind readers can tell apart; the dashes do without colour.
STYLES = {
    "full": ("#000000", "-"),
    "work_sharing": ("#009E73", "-"),
    "solo": ("#D55E00", "-"),
    "majority": ("#0072B2", "--"),
    "solo_latest": ("#CC79A7", ":"),
    "quorum": ("#56B4E9", "-."),
    "group_average": ("#009E73", "-"),
    "partial_reduce": ("#E69F00", "--"),
    "weighted_average": ("#CC79A7", ":"),
}
COMPUTING, WAITING, LATE = "#56B4E9", "#D55E00", "#E69F00"


def accuracy(
    results: Mapping[str, Any], labels: Mapping[str, str], file: Path, *, title: str, ylabel: str, lowest: float
) -> None:
    """Accuracy against wall-clock time, one line per policy; the axis begins at `lowest` percent."""
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for name, result in results.items():
        seconds, values = zip(*result["curve"], strict=True)
        colour, dashes = STYLES[name]
        percent = [100 * value for value in values]
        label = f"{labels[name]}: {100 * result['accuracy']:.1f} % after {result['seconds']:.1f} s"
        axes.plot(seconds, percent, dashes, color=colour, label=label, linewidth=2)
        axes.plot(seconds[-1], percent[-1], "o", color=colour, markersize=7)
    axes.set(
        title=title,
        xlabel="wall-clock time in seconds",
        ylabel=ylabel,
        ylim=(lowest, 100),
        xlim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", title="all ranks, when the work is done (dot)")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def arrivals(results: Mapping[str, Any], labels: Mapping[str, str], steps: int, file: Path) -> None:
    """When each rank computes and waits in the first steps, and how many of its steps were late, one row per policy."""
    shown = [name for name in ("full", "work_sharing", "solo", "majority") if name in results]
    ranks = len(results[shown[0]]["computing"])
    figure, rows = plt.subplots(
        len(shown),
        2,
        figsize=(11, 2.2 * len(shown)),
        sharex="col",
        sharey=True,
        width_ratios=(3, 1),
        layout="constrained",
    )
    end = max(begin + length for timeline in results["solo"]["waiting"] for begin, length in timeline)
    for (timeline, shares), name in zip(rows, shown, strict=True):
        result = results[name]
        for rank in range(ranks):
            timeline.broken_barh(result["computing"][rank], (rank - 0.3, 0.6), facecolor=COMPUTING)
            timeline.broken_barh(result["waiting"][rank], (rank - 0.3, 0.6), facecolor=WAITING)
            arrived = [begin for begin, _ in result["waiting"][rank]]
            timeline.plot(arrived, [rank] * len(arrived), "|", color="black", markersize=15)
        late = result["late_by_rank"]
        shares.barh(range(ranks), [steps - count for count in late], height=0.6, color=COMPUTING)
        shares.barh(range(ranks), late, left=[steps - count for count in late], height=0.6, color=LATE, hatch="///")
        timeline.set(xlim=(0, end), title=f"{labels[name]}: the first steps", yticks=range(ranks))
        timeline.set(ylabel="rank")
        shares.set(title=f"{sum(late) / (steps * ranks):.0%} of all steps late")
    rows[0, 0].invert_yaxis()
    rows[-1, 0].set_xlabel("wall-clock time in seconds")
    rows[-1, 1].set_xlabel("steps of a rank")
    figure.legend(
        handles=[
            Patch(facecolor=COMPUTING, label="computing"),
            Line2D([], [], color="black", marker="|", linestyle="", markersize=12, label="arrival"),
            Patch(facecolor=WAITING, label="waiting for others"),
            Patch(facecolor=COMPUTING, label="steps on time"),
            Patch(facecolor=LATE, hatch="///", label="late steps"),
        ],
        loc="outside lower center",
        ncols=5,
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)


def lengths(frames: np.ndarray, step_ms: np.ndarray, file: Path) -> None:
    """How long sequences are, and how long steps take: `step_ms` has a row for each step, a column for each rank."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left.hist(frames, bins=60, color=COMPUTING)
    left.axvline(frames.mean(), color="black", label=f"mean {frames.mean():.0f}")
    left.set(title=f"Lengths of {len(frames):,} sequences: {frames.min()} to {frames.max()} frames")
    left.set(xlabel="length in frames", ylabel="sequences", xlim=(0, None))
    slowest = step_ms.max(axis=1)
    edges = np.linspace(0, step_ms.max(), 41)
    right.hist(step_ms.ravel(), bins=edges, density=True, color=COMPUTING, label=f"a rank's, mean {step_ms.mean():.0f}")
    right.hist(
        slowest,
        bins=edges,
        density=True,
        histtype="step",
        color=WAITING,
        linewidth=2,
        label=f"the slowest rank's, mean {slowest.mean():.0f}",
    )
    right.set(title="Time of a step, from the padded length of its batch")
    right.set(xlabel="milliseconds", ylabel="share of steps per millisecond", xlim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)
