"""Makes the plots of a report on a recording. This module needs plotly; the package itself does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from horovod_partial.insight.recording import RankSteps
from horovod_partial.insight.report.comparison import Runs, name
from horovod_partial.insight.report.summary import Summary

Floats = NDArray[np.float64]
_Values = Callable[[RankSteps], NDArray[Any]]

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COMPUTE, _WAIT, _REDUCE = "#0072B2", "#E69F00", "#009E73"
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# The parts of the compute time, in the order of `_core.PARTS`. Compute times whose parts are unknown are one bar.
_PARTS = ("loader", "forward", "backward", "optimizer", "other work")
_COLOURS_OF_PARTS = ("#CC79A7", "#56B4E9", "#3182BD", "#08306B", "#F0E442")
_LEAST_SECONDS = 1e-5  # a part that is shorter on all ranks has no bar
_GREY = "#999999"
_DASHES = {"": "solid", "before": "dot", "after": "solid"}  # of the lines of a run, by its label
_HEAT = [[0.0, "#f4f6f8"], [0.35, "#F3C969"], [0.7, "#D55E00"], [1.0, "#6b1d00"]]
_COLUMNS, _CELLS = 1000, 60_000  # the most columns and cells of a heat map: larger ones make browsers slow
_WINDOWS = 60
_LINES = len(_COLOURS)
_POINTS = 3000


@dataclass(frozen=True)
class Plot:
    """A figure of a report, its title, and a text that says how to read it. All runs are in it, with the same scales."""

    title: str
    reading: str
    figure: go.Figure


def plots(runs: Runs) -> list[Plot]:
    """Return the plots that the recordings have data for, in the order of the page."""
    made = [_compute_times(runs), _slow_ranks(runs), _parts(runs), _waiting(runs)]
    if sharing := {label: run for label, run in runs.items() if run.shares_work}:
        darker, unit = "it made more of the micro-batches of an update.", "micro-batches in an update"
        made.append(_of_each_rank(sharing, lambda of: of.micro_batches, "Micro-batches", darker, unit))
    if late := {label: run for label, run in runs.items() if run.steps.rounds and not run.shares_work}:
        darker = "more of its steps had a contribution that came too late for its round and travelled with a later one."
        made.append(_of_each_rank(late, lambda of: 100.0 * of.late, "Late steps", darker, "% of steps", most=100.0))
        darker = "it had missed more rounds before a step, so it computed with an older model."
        made.append(_of_each_rank(late, lambda of: of.staleness, "Staleness", darker, "rounds missed"))
        made += [plot for label, run in late.items() for plot in _rounds(run, label)]
    return made


def _compute_times(runs: Runs) -> Plot:
    ranks = [rank for run in runs.values() for rank in run.ranks]
    normal = min(rank.slowness.compute for rank in ranks)
    windows = max(_WINDOWS, min(_COLUMNS, _CELLS // len(ranks)))
    edges, times = _windows([run.steps.compute.T / normal for run in runs.values()], windows)
    most = max(1.5, float(np.nanquantile(times, 0.995)))
    figure = _heat(runs, edges, times, "of the fastest's mean", (1.0, most))
    each = "step" if len(edges) > edges[-1] else "few steps"
    return Plot(
        "Compute time of each rank",
        f"A row is a rank, and a column is a {each}. Darker colours mean longer computation. A dark row is a rank that is always "
        "slow, dark stretches are bursts, dark specks are random slow steps, and a dark column is a step that was long for all.",
        figure,
    )


def _slow_ranks(runs: Runs) -> Plot:
    slow = [rank.rank for run in runs.values() for rank in run.slow]
    slowest = slow or [rank.rank for run in runs.values() for rank in run.slowest_first]
    colours = dict(zip(dict.fromkeys(slowest), _COLOURS[: _LINES // len(runs)], strict=False))
    series, lines = [], []
    for label, run in runs.items():
        shown = [rank for rank in run.slowest_first if rank.rank in colours]
        series.append(1e3 * np.array([np.median(run.steps.compute, axis=1), *(rank.steps.share for rank in shown)]))
        of_run = [("median of all ranks", _GREY), *((f"rank {rank.rank}", colours[rank.rank]) for rank in shown)]
        lines += [(name(text, label), {"color": colour, "dash": _DASHES[label]}) for text, colour in of_run]
    edges, times = _windows(series, _COLUMNS)
    figure = go.Figure()
    for (text, line), values in zip(lines, times, strict=True):
        figure.add_scatter(x=edges[:-1], y=values, name=text, mode="lines", line={"width": 1.3, **line})
    _axes(figure, "step", "compute time (ms)", rangemode="tozero")
    which = "slow ranks" if slow else "slowest ranks"
    return Plot(
        f"Compute time of the {which}",
        f"Each line is one of the {which} (at most {_LINES // len(runs)}). Where it lies on the grey line, the rank is as fast as the others.",
        figure,
    )


def _parts(runs: Runs) -> Plot:
    figure = go.Figure()
    bars = [(name(f"rank {rank.rank}", label), rank) for label, run in runs.items() for rank in run.ranks]
    bars.sort(key=lambda bar: bar[1].rank)  # so the bars of a rank in both runs lie side by side
    names, ranks = [text for text, _ in bars], [rank for _, rank in bars]
    compute = np.array([rank.steps.compute.mean() for rank in ranks])
    known = np.array([np.maximum(rank.steps.parts, 0).mean(axis=0) for rank in ranks])
    parts = (
        *zip(_PARTS, _COLOURS_OF_PARTS, known.T, strict=True),
        ("compute", _COMPUTE, np.maximum(compute - known.sum(axis=1), 0)),
        ("wait for others", _WAIT, [rank.steps.wait.mean() for rank in ranks]),
        ("reduction", _REDUCE, [rank.steps.reduce.mean() for rank in ranks]),
    )
    for part, colour, seconds in parts:
        if np.max(seconds) < _LEAST_SECONDS:
            continue
        figure.add_bar(y=names, x=1e3 * np.array(seconds), name=part, orientation="h", marker_color=colour)
    _axes_of_ranks(figure, "mean time of a step (ms)", names, barmode="stack")
    return Plot(
        "What a step's time went to",
        "A bar is a rank's mean step. Where a step has several backward passes, backward contains forward. "
        + (
            "Under WorkSharing slow ranks compute as long as the others, and make fewer micro-batches."
            if any(run.shares_work for run in runs.values())
            else "The others wait for a rank with a long bar before its orange part."
        ),
        figure,
    )


def _waiting(runs: Runs) -> Plot:
    title, reading = (
        "Waiting",
        "The line adds up how long a rank has waited, on average. A policy that waits for nobody saves this time.",
    )
    if any(run.steps.rounds for run in runs.values()):
        title = "Waiting, against Full()"
        reading = (
            "The lines add up how long a rank has waited, on average. Orange lines are recorded. For grey ones, each step with the "
            "recorded compute times waits for its slowest rank. The difference is what the policy has saved."
        )
    figure = go.Figure()
    for label, run in runs.items():
        lines = [(f"recorded, {run.steps.policy}", run.waited, _WAIT)]
        if run.steps.rounds:
            lines.append(("under Full(), computed", run.waited_under_full, _GREY))
        steps = np.unique(np.linspace(0, len(run.waited) - 1, min(len(run.waited), _COLUMNS)).astype(int))
        for text, seconds, colour in lines:
            line = {"color": colour, "dash": _DASHES[label]}
            figure.add_scatter(x=steps, y=np.cumsum(seconds)[steps], name=name(text, label), mode="lines", line=line)
    _axes(figure, "step", "waited so far (s)")
    return Plot(title, reading, figure)


def _of_each_rank(runs: Runs, values: _Values, title: str, darker: str, unit: str, most: float | None = None) -> Plot:
    of_runs = [np.array([values(steps) for steps in run.steps.ranks], dtype=np.float64) for run in runs.values()]
    edges, means = _windows(of_runs, _WINDOWS)
    reading = f"A row is a rank. Darker colours mean that {darker}"
    return Plot(title, reading, _heat(runs, edges, means, unit, (0.0, most or max(1.0, float(np.nanmax(means))))))


def _rounds(summary: Summary, label: str) -> Iterator[Plot]:
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
        name("Rounds, and the quorum", label),
        "A dot is a round. Its height is the number of ranks that were on time, and its colour tells why it closed. The line is "
        "the number of arrivals that the policy asked for.",
        figure,
    )


def _windows(of_runs: list[Floats], most: int) -> tuple[NDArray[np.int64], Floats]:
    """Divide the steps of all runs into at most `most` windows. Steps are counted as in `Slowness`, from 0 in each run.

    `of_runs` has the values of each run, of the shape (rows, steps). Returns the first step of each window, and behind
    them the end of the last; and the means of the values within each window, of the shape (rows of all runs, windows).
    A mean is NaN if the run has ended before the window.
    """
    steps = max(values.shape[1] for values in of_runs)
    edges = np.r_[np.unique(np.linspace(0, steps, min(steps, most), endpoint=False).astype(int)), steps]
    means = []
    for values in of_runs:
        begins = edges[edges < values.shape[1]]
        sizes = np.diff(np.r_[begins, values.shape[1]])
        after = ((0, 0), (0, len(edges) - 1 - len(begins)))
        means.append(np.pad(np.add.reduceat(values, begins, axis=1) / sizes, after, constant_values=np.nan))
    return edges, np.concatenate(means)


def _heat(runs: Runs, edges: NDArray[np.int64], values: Floats, unit: str, span: tuple[float, float]) -> go.Figure:
    names = [name(f"rank {rank.rank}", label) for label, run in runs.items() for rank in run.ranks]
    figure = go.Figure()
    figure.add_heatmap(
        x=edges,
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
    _axes_of_ranks(figure, "step", names, above=55, margin_t=10)
    return figure


def _axes_of_ranks(figure: go.Figure, x: str, names: list[str], above: int = 0, **layout: Any) -> None:
    _axes(figure, x, "", autorange="reversed", type="category")
    height, left = min(150 + 24 * len(names), 900) + above, max(60, 8 * max(map(len, names)))
    figure.update_layout(height=height, margin_l=left, **layout)


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
