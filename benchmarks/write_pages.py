"""Write README.md and pages of docs from their texts in `benchmarks/pages` and the figures in `benchmarks/results`.

    .venv/bin/python benchmarks/write_pages.py

A text is Markdown with expressions of Jinja. `{{ straggler.solo["40"] | fixed }}` is a number of straggler.json, with two decimals. A
measured number never stands in a text, so each says where it comes from, and a page changes with its file. What an expression may call
is below: `FILTERS` and `FUNCTIONS`. A number without a format is an error, and so is a name that is not in the file.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from scipy import stats

TOP = Path(__file__).resolve().parents[1]
PAGES, RESULTS = TOP / "benchmarks" / "pages", TOP / "benchmarks" / "results"
NOTE = "<!-- Made by benchmarks/write_pages.py. Change benchmarks/pages/{name} in place of it. -->\n"

# Code, or lines of prose: no headings, tables, lists or comments.
PROSE = re.compile(r"^```.*?^```$|(?:^(?!\d+\. )[^\s|#<>!*:{-][^\n]*\n)+", re.MULTILINE | re.DOTALL)
WIDTH = 140

LEAST_P = 0.05  # what a paired t-test finds with a larger p is level
# Of differences between qualities.
UNITS = {"accuracy": " points", "perplexity": " %", "hinge loss": " %", "return": ""}
POLICIES = {
    "full": "`Full()`",
    "full, balanced batches": "`Full()`, balanced batches",
    "majority": "`Majority()`",
    "partial_reduce": "`PartialReduce(2)`",
    "quorum 0.75": "`Quorum(0.75)`",
    "solo": "`Solo()`",
    "solo+latest": '`Solo(missed="latest")`',
    "work_sharing": "`WorkSharing()`",
}


def policy(arm: str) -> str:
    """How pages call an arm of benchmarks/work.py."""
    name, _, beta = arm.partition(", momentum ")
    return POLICIES[name] + (f" with `{beta}`" if beta else "")


def betas(program: Mapping[str, Any]) -> list[str]:
    """Adam's first betas that were tried beside the program's own."""
    return sorted({arm.split(", momentum ")[1] for arm in program["arms"] if ", momentum " in arm}, key=float)


def fixed(number: float, digits: int = 2) -> str:
    return f"{number:,.{digits}f}"


def short(number: float) -> str:
    """Of a number below 10 one decimal, of a larger one none."""
    return fixed(number, 1 if number < 10 else 0)


def percent(share: float, digits: int = 0) -> str:
    return f"{fixed(100 * share, digits)} %"


def span(numbers: Iterable[float], digits: int = 2, times: float = 1.0) -> str:
    """From the least to the largest; 100 times as much for percent."""
    known = [times * number for number in numbers]
    return f"{fixed(min(known), digits)} to {fixed(max(known), digits)}"


def interval(of: Mapping[str, float]) -> str:
    """Of a ratio: with its 95 % interval."""
    return f"{fixed(of['ratio'])} ({span([of['low'], of['high']])})"


def every(of: Iterable[Mapping[str, Any]], *names: str) -> list[Any]:
    """What has one of the names in any of these; of a list all that is in it. Each name is in one of these, or more."""
    ones = list(of)
    if unknown := [name for name in names if not any(name in one for one in ones)]:
        raise KeyError(unknown)
    found = [one[name] for one in ones for name in names if name in one]
    return [each for value in found for each in (value if isinstance(value, list) else [value])]


def command(file: Mapping[str, Any]) -> str:
    """How to measure a file again, without Python's part."""
    about = file["about"]
    return f"`{' '.join([*map('='.join, about['environment'].items()), about['command']])}`"


def not_quiet(file: Mapping[str, Any]) -> str:
    """What stands behind a figure of a file that was not measured quietly."""
    return " (**not quiet**: other programs ran beside the benchmark)" if file["about"]["busy"] else ""


def plus_minus(number: float, error: float, digits: int = 1, sign: str = "") -> str:
    return f"{number:{sign},.{digits}f} ± {fixed(error, digits)}"


def verdict(difference: float, error: float, seeds: int) -> str:
    """Of what is better by this much, a mean over seeds with its standard error: by Student's paired t-test, two-sided."""
    if seeds < 2:
        raise ValueError("a verdict takes two seeds or more")
    if abs(difference) <= stats.t.ppf(1 - LEAST_P / 2, seeds - 1) * error:
        return "level"
    return "ahead" if difference > 0 else "behind"


def compared(difference: float, error: float, seeds: int, unit: str, digits: int = 1) -> str:
    """The verdict on what is better by this much, and the difference with its standard error."""
    found = verdict(difference, error, seeds)
    shown = difference if found == "level" else abs(difference)
    return f"{found} ({plus_minus(shown, error, digits)}{unit})"


def paired(differences: Sequence[float], unit: str, digits: int) -> str:
    """The verdict on differences by seed, of which a positive one is better."""
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return compared(statistics.fmean(differences), error, len(differences), unit, digits)


def by_seed(accuracies: Sequence[float], others: Sequence[float]) -> str:
    """The verdict on accuracies, compared with others seed by seed."""
    return paired([100 * (mine - other) for mine, other in zip(accuracies, others, strict=True)], " points", 2)


def qualities(program: Mapping[str, Any], arm: str, digits: int = 1) -> str:
    """Of the arm, and of Full: means over the seeds, and their standard deviations."""
    rows, name = [program["arms"][one] for one in (arm, "full")], program["quality"]
    mine, full = (plus_minus(row["quality"], row["deviation"], digits) for row in rows)
    return f"{mine} %; {full} %" if name == "accuracy" else f"{name} {mine}; {full}"


def not_compared(program: Mapping[str, Any], arm: str, other: str = "full") -> str:
    """Why two arms are not compared: one of them may have a better rate than those of its grid. Empty if they are."""
    edge = ", ".join(policy(each) for each in dict.fromkeys((other, arm)) if each in program["at_the_edge"])
    return f"not compared (edge: {edge})" if edge else ""


def in_the_same_time(program: Mapping[str, Any], arm: str, digits: int = 1) -> str:
    """The verdict on an arm of benchmarks/work.py against Full in the time that the arm takes."""
    row = program["arms"][arm]
    if why := not_compared(program, arm):
        return why
    if row["ahead"] is None:
        return "not measured"
    return compared(row["ahead"], row["ahead_error"], seeds(program), UNITS[program["quality"]], digits)


def after_as_many_steps(program: Mapping[str, Any], arm: str, digits: int = 1, other: str = "full") -> str:
    """The verdict on an arm of benchmarks/work.py against another after as many steps. Of a perplexity or a loss, less is better."""
    if why := not_compared(program, arm, other):
        return why
    unit = UNITS[program["quality"]]
    pairs = zip(*(program["arms"][one]["quality_by_seed"] for one in (arm, other)), strict=True)
    differences = [100 * (1 - mine / its) if unit == " %" else mine - its for mine, its in pairs]
    return paired(differences, unit, digits)


def lengths(program: Mapping[str, Any]) -> str:
    """The shares of the steps of the shorter trainings under Full."""
    shares = [found[1] for arm in program["arms"] if (found := re.match(r"full, (\d+)% of the steps", arm))]
    return f"{', '.join(shares)} %"


def seeds(program: Mapping[str, Any]) -> int:
    return len(program["arms"]["full"]["seconds_by_seed"])


def within(ratios: Sequence[float], margin: float = 0.1) -> float:
    """The share of ratios that are off by the margin at most."""
    return statistics.fmean(1 - margin <= ratio <= 1 + margin for ratio in ratios)


FILTERS = {
    "fixed": fixed,
    "short": short,
    "percent": percent,
    "span": span,
    "every": every,
    "interval": interval,
    "command": command,
    "not_quiet": not_quiet,
    "number": "{:,g}".format,
    "policy": policy,
    "median": statistics.median,
    "within": within,
}
FUNCTIONS = {
    "plus_minus": plus_minus,
    "compared": compared,
    "after_as_many_steps": after_as_many_steps,
    "betas": betas,
    "by_seed": by_seed,
    "qualities": qualities,
    "in_the_same_time": in_the_same_time,
    "lengths": lengths,
    "seeds": seeds,
}


class Pages:
    """The texts, ready for figures."""

    def __init__(self) -> None:
        environment = self.environment()
        self._texts = {file.relative_to(PAGES).as_posix(): file.read_text() for file in sorted(PAGES.glob("**/*.md"))}
        self._templates = {name: environment.get_template(name) for name in self._texts}

    @staticmethod
    def environment() -> jinja2.Environment:
        """What texts are read with: an error where they name what is not there, or give a number no format."""
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(PAGES),
            undefined=jinja2.StrictUndefined,
            finalize=_formatted,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters.update(FILTERS)
        environment.globals.update(FUNCTIONS)
        return environment

    def write(self, results: Mapping[str, Any]) -> dict[str, str]:
        """The pages, by their names from the top folder on, as these results by name make them."""
        sources = lambda *names: _sources(results, names)
        pages = {name: template.render(results, sources=sources) for name, template in self._templates.items()}
        return {name: NOTE.format(name=name) + _filled(page, self._texts[name]) for name, page in pages.items()}


def stored() -> dict[str, Any]:
    """All results, by the names of their files."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def _formatted(value: Any) -> Any:
    if value is None or isinstance(value, float):
        raise ValueError(f"{value!r} in a page: give a number its format, and leave out what was not measured")
    return value


def _filled(page: str, text: str) -> str:
    """The page, with new ends of lines in prose that is not as in the text."""

    def fill(prose: re.Match[str]) -> str:
        if prose[0] in text:
            return prose[0]
        return textwrap.fill(prose[0], WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"

    return PROSE.sub(fill, page)


def _sources(results: Mapping[str, Any], names: Sequence[str]) -> str:
    """A comment that names the files of a section, and a sentence if they were not measured quietly."""
    busy = [f"`{name}`" for name in names if results[name]["about"]["busy"]]
    comment = f"<!-- results: {' '.join(names)} -->"
    if not busy:
        return comment
    return f"{comment}\n**Not quiet:** other programs ran beside these benchmarks when {', '.join(busy)} began.\n"


def main() -> None:
    for name, page in Pages().write(stored()).items():
        (TOP / name).write_text(page)


if __name__ == "__main__":
    main()
