"""Draws the plot of an experiment."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from experiment import Plot

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#999999")
MARKERS = "os^Dv<>P"


def draw(plot: Plot, file: Path, title: str) -> None:
    """Draw lines, or bars side by side, into a PNG file."""
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for index, (label, (xs, ys)) in enumerate(plot.series.items()):
        colour = COLOURS[index % len(COLOURS)]
        if plot.bars:
            width = 0.8 / len(plot.series)
            places = np.arange(len(xs)) + (index + 0.5) * width - 0.4
            axes.bar(places, ys, width, color=colour, label=label)
            upright = len(plot.ticks) > 8  # or they would overlap
            axes.set_xticks(range(len(xs)), plot.ticks or [f"{x:g}" for x in xs], rotation=90 if upright else 0)
        else:
            style = "-" if index < len(COLOURS) else "--"  # where colours come again
            axes.plot(xs, ys, style, marker=MARKERS[index % len(MARKERS)], markersize=4, color=colour, label=label)
    axes.set(title=title, xlabel=plot.xlabel, ylabel=plot.ylabel)
    if plot.log_x and not plot.bars:
        axes.set_xscale("log", base=2)
    if plot.log_y:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)
