"""Makes the plots of a report on a recording. This module needs plotly; the package itself does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from horovod_partial.insight.report.summary import Summary

Floats = NDArray[np.float64]

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COMPUTE, _WAIT, _REDUCE = "#0072B2", "#E69F00", "#009E73"
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# The parts of the compute time, in the order of `_core.PARTS`. Compute times whose parts are unknown are one bar.
_PARTS = ("loader", "forward", "backward", "optimizer", "other work")
_COLOURS_OF_PARTS = ("#CC79A7", "#56B4E9", "#3182BD", "#08306B", "#F0E442")
_LEAST_SECONDS = 1e-5  # a part that is shorter on all ranks has no bar
_GREY = "#999999"
_HEAT = [[0.0, "#f4f6f8"], [0.35, "#F3C969"], [0.7, "#D55E00"], [1.0, "#6b1d00"]]
_COLUMNS, _CELLS = 1000, 60_000  # the most columns and cells of a heat map: larger ones make browsers slow
_WINDOWS = 60
_LINES = len(_COLOURS)
_POINTS = 3000


@dataclass(frozen=True)
class Plot:
    """A figure of a report, its title, and a text that says how to read it."""

    title: str
    reading: str
    figure: go.Figure


def plots(summary: Summary) -> list[Plot]:
    """Return the plots that the recording has data for, in the order of the page."""
    made = [_compute_times(summary), _slow_ranks(summary), _parts(summary), _waiting(summary)]
    ranks = summary.steps.ranks
    if summary.shares_work:
        darker = "it made more of the micro-batches of an update."
        of_ranks = [steps.micro_batches for steps in ranks]
        made.append(_of_each_rank(summary, of_ranks, "Micro-batches", darker, "micro-batches in an update"))
    elif summary.steps.rounds:
        darker = "more of its steps had a contribution that came too late for its round and travelled with a later one."
        late = [100.0 * steps.late for steps in ranks]
        made.append(_of_each_rank(summary, late, "Late steps", darker, "% of steps", most=100.0))
        darker = "it had missed more rounds before a step, so it computed with an older model."
        made.append(_of_each_rank(summary, [steps.staleness for steps in ranks], "Staleness", darker, "rounds missed"))
        made += _rounds(summary)
    return made


def _compute_times(summary: Summary) -> Plot:
    compute = summary.steps.compute.T
    normal = min(rank.slowness.compute for rank in summary.ranks)
    edges, times = _windows(summary, compute / normal, max(_WINDOWS, min(_COLUMNS, _CELLS // len(compute))))
    most = max(1.5, float(np.quantile(times, 0.995)))
    figure = _heat(summary, edges, times, "of the fastest's mean", (1.0, most))
    each = "step" if len(edges) == len(summary.waited) else "few steps"
    return Plot(
        "Compute time of each rank",
        f"A row is a rank, and a column is a {each}. Darker colours mean longer computation. A dark row is a rank that is always "
        "slow, dark stretches are bursts, dark specks are random slow steps, and a dark column is a step that was long for all.",
        figure,
    )


def _slow_ranks(summary: Summary) -> Plot:
    ranks = (summary.slow or summary.slowest_first)[:_LINES]
    series = np.array([np.median(summary.steps.compute, axis=1), *(rank.steps.share for rank in ranks)])
    edges, times = _windows(summary, 1e3 * series, _COLUMNS)
    figure = go.Figure()
    names = ["median of all ranks", *(f"rank {rank.rank}" for rank in ranks)]
    for name, values, colour in zip(names, times, (_GREY, *_COLOURS), strict=False):
        figure.add_scatter(x=edges, y=values, name=name, mode="lines", line={"color": colour, "width": 1.3})
    _axes(figure, "step", "compute time (ms)", rangemode="tozero")
    which = "slow ranks" if summary.slow else "slowest ranks"
    return Plot(
        f"Compute time of the {which}",
        f"Each line is one of the {which} (at most {_LINES}). Where it lies on the grey line, the rank is as fast as the others.",
        figure,
    )


def _parts(summary: Summary) -> Plot:
    figure = go.Figure()
    names = [f"rank {rank.rank}" for rank in summary.ranks]
    compute = np.array([rank.steps.compute.mean() for rank in summary.ranks])
    known = np.array([np.maximum(rank.steps.parts, 0).mean(axis=0) for rank in summary.ranks])
    parts = (
        *zip(_PARTS, _COLOURS_OF_PARTS, known.T, strict=True),
        ("compute", _COMPUTE, np.maximum(compute - known.sum(axis=1), 0)),
        ("wait for others", _WAIT, [rank.steps.wait.mean() for rank in summary.ranks]),
        ("reduction", _REDUCE, [rank.steps.reduce.mean() for rank in summary.ranks]),
    )
    for name, colour, seconds in parts:
        if np.max(seconds) < _LEAST_SECONDS:
            continue
        figure.add_bar(y=names, x=1e3 * np.array(seconds), name=name, orientation="h", marker_color=colour)
    figure.update_layout(barmode="stack", height=_height(len(names)))
    _axes(figure, "mean time of a step (ms)", "", autorange="reversed", type="category")
    return Plot(
        "What a step's time went to",
        "A bar is a rank's mean step. Where a step has several backward passes, backward contains forward. "
        + (
            "Under WorkSharing slow ranks compute as long as the others, and make fewer micro-batches."
            if summary.shares_work
            else "The others wait for a rank with a long bar before its orange part."
        ),
        figure,
    )


def _waiting(summary: Summary) -> Plot:
    lines = [(f"recorded, {summary.steps.policy}", summary.waited, _WAIT, "solid")]
    title, reading = (
        "Waiting",
        "The line adds up how long a rank has waited, on average. A policy that waits for nobody saves this time.",
    )
    if summary.steps.rounds:
        lines.append(("under Full(), computed", summary.waited_under_full, _GREY, "dash"))
        title = "Waiting, against Full()"
        reading = (
            "The lines add up how long a rank has waited, on average. One line is recorded. For the other, each step with these "
            "compute times waits for its slowest rank. The difference is what the policy has saved."
        )
    figure = go.Figure()
    step = summary.steps.ranks[0].step
    rows = np.unique(np.linspace(0, len(step) - 1, min(len(step), _COLUMNS)).astype(int))
    for name, seconds, colour, dash in lines:
        line = {"color": colour, "dash": dash}
        figure.add_scatter(x=step[rows], y=np.cumsum(seconds)[rows], name=name, mode="lines", line=line)
    _axes(figure, "step", "waited so far (s)")
    return Plot(title, reading, figure)


def _of_each_rank(
    summary: Summary, values: list[NDArray[Any]], title: str, darker: str, unit: str, most: float | None = None
) -> Plot:
    edges, means = _windows(summary, np.array(values, dtype=np.float64), _WINDOWS)
    reading = f"A row is a rank. Darker colours mean that {darker}"
    return Plot(title, reading, _heat(summary, edges, means, unit, (0.0, most or max(1.0, float(means.max())))))


def _rounds(summary: Summary) -> Iterator[Plot]:
    """Plot the rounds of the bucket of all ranks that moved the most bytes, in the order in which rank 0 closed them.

    Yields nothing if there are fewer than two rounds, or rank 0 was not recorded.
    """
    decider = summary.recording.ranks.get(0)
    if decider is None:
        return
    table, buckets = decider.tables["rounds"], decider.buckets
    counts = Counter(number for number in table["bucket"].tolist() if buckets[number].process_set == 0)
    if counts.total() < 2:
        return
    rows = np.flatnonzero(table["bucket"] == max(sorted(counts), key=lambda one: buckets[one].nbytes * counts[one]))
    rows = rows[np.argsort(table["time"][rows], kind="stable")]
    rows = rows[:: -(-len(rows) // _POINTS)]
    time = summary.clocks.seconds(decider, table["time"][rows])
    arrived = summary.recording.size - np.array([len(missing) for missing in table["missing"][rows]])
    reasons = table["reason"][rows]
    figure = go.Figure()
    for reason, colour in zip(np.unique(reasons.astype(str)), _COLOURS, strict=False):
        of = reasons == reason
        marker = {"color": colour, "size": 5, "opacity": 0.7}
        figure.add_scatter(x=time[of], y=arrived[of], name=f"closed by {reason}", mode="markers", marker=marker)
    line = {"color": _GREY, "width": 1, "shape": "hv"}
    figure.add_scatter(x=time, y=table["quorum"][rows], name="quorum", mode="lines", line=line)
    _axes(figure, "time (s)", "ranks on time", rangemode="tozero")
    yield Plot(
        "Rounds, and the quorum",
        "A dot is a round. Its height is the number of ranks that were on time, and its colour tells why it closed. The line is "
        "the number of arrivals that the policy asked for.",
        figure,
    )


def _windows(summary: Summary, values: Floats, most: int) -> tuple[NDArray[np.int64], Floats]:
    """Divide the steps into at most `most` windows.

    Returns the first step of each window, and the means of the values within each window. `values` has the shape (rows,
    steps), and the means have the shape (rows, windows).
    """
    step = summary.steps.ranks[0].step
    begins = np.unique(np.linspace(0, len(step), min(len(step), most), endpoint=False).astype(int))
    sizes = np.diff(np.r_[begins, len(step)])
    return step[begins], np.add.reduceat(values, begins, axis=1) / sizes


def _heat(
    summary: Summary, edges: NDArray[np.int64], values: Floats, unit: str, span: tuple[float, float]
) -> go.Figure:
    names = [f"rank {rank.rank}" for rank in summary.ranks]
    figure = go.Figure()
    figure.add_heatmap(
        x=np.r_[edges, summary.steps.ranks[0].step[-1] + 1],
        y=names,
        z=values.astype(np.float32),
        zmin=span[0],
        zmax=span[1],
        colorscale=_HEAT,
        # The colour bar lies above the map, so that the map has room on a narrow screen.
        colorbar={
            "title": {"text": unit, "side": "top"},
            "orientation": "h",
            "thickness": 12,
            "y": 1,
            "yanchor": "bottom",
        },
        hovertemplate="%{y}, step %{x}: %{z:.2f} " + unit + "<extra></extra>",
    )
    _axes(figure, "step", "", autorange="reversed", type="category")
    figure.update_layout(height=_height(len(names)) + 55, margin_t=10)
    return figure


def _height(rows: int) -> int:
    return min(150 + 24 * rows, 900)


def _axes(figure: go.Figure, x: str, y: str, **of_y: Any) -> None:
    figure.update_xaxes(title_text=x, zeroline=False, ticks="outside")
    figure.update_yaxes(title_text=y or None, zeroline=False, ticks="outside", **of_y)
    figure.update_layout(
        template="none",
        font={"family": "system-ui, sans-serif", "size": 13},
        margin={"l": 60, "r": 20, "t": 40 if len(figure.data) > 1 else 15, "b": 50},
        legend={
            "orientation": "h",
            "y": 1.02,
            "yanchor": "bottom",
            "x": 0,
            "traceorder": "normal",
            "itemsizing": "constant",
        },
        showlegend=len(figure.data) > 1,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
