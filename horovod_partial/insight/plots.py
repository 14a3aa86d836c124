"""Plots of simulated jobs. This module needs matplotlib; the package itself does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import ScalarFormatter

from horovod_partial import _core
from horovod_partial.insight.simulate import Result, Trace
from horovod_partial.merging import MessageCost

# Okabe and Ito's colours: colour-blind readers can tell them apart. Markers differ too, for prints without colour.
_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
_MARKERS = "os^Dv<>"
_FORWARD, _BACKWARD, _MESSAGES = "#BBBBBB", "#56B4E9", ("#D55E00", "#E69F00")


def scaling(curves: Mapping[str, Mapping[int, Result]], title: str, path: str | PathLike[str]) -> None:
    """Plot iteration time and scaling efficiency over the number of ranks, with one line for each label of `curves`."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, (label, results) in enumerate(curves.items()):
        ranks = list(results)
        style = {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)], "label": label}
        left.plot(ranks, [1e3 * result.iteration_time for result in results.values()], **style)
        right.plot(ranks, [100 * result.efficiency for result in results.values()], **style)
    left.set(ylabel="milliseconds of an iteration", ylim=(0, None))
    right.set(ylabel="scaling efficiency in percent", ylim=(0, 105))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def gantt(trace: Trace, rules: Sequence[str], cost: MessageCost, title: str, path: str | PathLike[str]) -> None:
    """Plot when a step computes, and when its messages travel, with a row for each rule of merged gradients.

    In each row a black line marks the end of the step. `cost` is the cost of a message.
    """
    figure = Figure(figsize=(11, 1.2 + 0.9 * len(rules)), layout="constrained")
    axes = figure.subplots()
    ends = [_step(axes, row, trace, rule, cost) for row, rule in enumerate(rules)]
    axes.set_yticks(range(len(rules)), rules)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds after the start of the step", xlim=(0, 1.25 * max(ends)), title=title)
    axes.grid(axis="x", alpha=0.3)
    handles = [Patch(facecolor=_FORWARD, label="forward"), Patch(facecolor=_BACKWARD, label="backward")]
    handles += [Patch(facecolor=_MESSAGES[0], label="messages, in two colours by turns")]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)


def _step(axes: Axes, row: int, trace: Trace, rule: str, cost: MessageCost) -> float:
    """Plot when a step computes, and when its messages travel under `rule`. Returns the end of the step, in ms."""
    plan = trace.plan(rule, cost)
    messages = _core.merging_messages(plan.messages, plan.ready, plan.nbytes, cost.latency, cost.seconds_per_byte)
    axes.broken_barh([(0, 1e3 * trace.forward)], (row - 0.36, 0.34), facecolor=_FORWARD)
    begins = [trace.forward, *trace.ready[:-1]]
    backward = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in zip(begins, trace.ready, strict=True)]
    axes.broken_barh(backward, (row - 0.36, 0.34), facecolor=_BACKWARD, edgecolor="white", linewidth=0.2)
    for turn, colour in enumerate(_MESSAGES):
        bars = [(1e3 * start, 1e3 * (end - start)) for start, end, _ in messages[turn::2]]
        axes.broken_barh(bars, (row + 0.02, 0.34), facecolor=colour)
    end = 1e3 * messages[-1][1]
    axes.vlines(end, row - 0.42, row + 0.42, color="black")
    count = f"{len(messages)} message{'s' if len(messages) > 1 else ''}"
    axes.annotate(f" {end:.0f} ms, {count}", (end, row), va="center")
    return end
