"""What an experiment of a paper is: a command, the paper's numbers beside ours, and a plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import harness

Value = TypeVar("Value")
RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Job:
    """How an experiment runs.

    Attributes:
        smoke: in seconds, to see that it runs; its figures mean nothing.
        transport: of Horovod, for what runs on ranks.
    """

    smoke: bool
    transport: harness.Transport

    def choose(self, whole: Value, smoke: Value) -> Value:
        """A number of steps or seeds, say: for the experiment itself, or for its smoke form."""
        return smoke if self.smoke else whole


@dataclass(frozen=True)
class Row:
    """One quantity: the paper's number, and ours.

    Attributes:
        quantity: what it is, with its unit.
        paper: as printed there; `"~"` before what was read off a plot; empty where the paper has no number.
        ours: as a number.
        how: measured on ranks of this machine, simulated at the paper's scale, or computed in one process.
    """

    quantity: str
    paper: str
    ours: float
    how: Literal["measured", "simulated", "computed"]


@dataclass(frozen=True)
class Plot:
    """Lines or bars over one axis: for each label its numbers along x and y.

    Attributes:
        ticks: what stands under bars in place of the numbers along x.
    """

    xlabel: str
    ylabel: str
    series: dict[str, tuple[list[float], list[float]]]
    log_x: bool = False
    log_y: bool = False
    bars: bool = False
    ticks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came out of an experiment.

    Attributes:
        rows: the table.
        plot: one picture.
        verdict: a sentence or two: where the claim is borne out, and where ours is worse.
        measured: what the rows were made of: the value of each seed or repeat, and absolute times or rates.
    """

    rows: list[Row]
    plot: Plot
    verdict: str = ""
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper.

    Attributes:
        paper: key of the paper, a file of this folder.
        name: on the command line, such as `fig9`.
        title: what it shows.
        setting: what runs here in the paper's place, with sizes.
        run: does it.
        grids: tables of the document: each names its columns. A quantity that names one of them stands in that column, in the line
            of what is left of its name.
    """

    paper: str
    name: str
    title: str
    setting: str
    run: Callable[[Job], Outcome]
    grids: tuple[tuple[str, ...], ...] = ()

    @property
    def file(self) -> Path:
        """Where the figures are kept from which the pages in docs/papers are made."""
        return RESULTS / f"{self.paper}.{self.name}.json"

    def save(self, outcome: Outcome) -> None:
        """Write the rows, the verdict, the measured values behind them, and where they come from. The plot is not kept."""
        rows = [asdict(row) for row in outcome.rows]
        harness.write_json(self.file, {"rows": rows, "verdict": outcome.verdict, "measured": outcome.measured})

    def load(self) -> tuple[list[Row], str, bool] | None:
        """The rows, the verdict, and whether the machine was busy; None if it has not run yet."""
        if not self.file.exists():
            return None
        kept = json.loads(self.file.read_text())
        return [Row(**row) for row in kept["rows"]], kept["verdict"], kept["about"]["busy"]


@dataclass(frozen=True)
class Refusal:
    """A figure or table that cannot be had here.

    Attributes:
        name: the figure or table.
        reason: why.
        instead: what stands in for it, or nothing.
    """

    name: str
    reason: str
    instead: str = ""


@dataclass(frozen=True)
class Paper:
    """A paper, and what became of it.

    Attributes:
        key: on the command line; the name of its file in this folder.
        name: as it is called in the documents.
        idea: what it is about, in a sentence of Markdown that docs/papers.md has.
        citation: in Markdown.
        implemented: what of it is where: pairs of a subject and a place.
        differs: what is otherwise here than there, and why: sentences.
        experiments: in the paper's order.
        refusals: in the paper's order.
    """

    key: str
    name: str
    idea: str
    citation: str
    implemented: tuple[tuple[str, str], ...]
    differs: tuple[str, ...]
    experiments: tuple[Experiment, ...]
    refusals: tuple[Refusal, ...] = field(default=())
