"""Figures of docs/benchmarks.md come from stored results, and those of README.md from that page.

A section names its files of `benchmarks/results` in a comment under its heading. A figure is right if a number of these
files, or one in a key, rounds to it; also 100 and 1,000 times such a number, for percent and milliseconds.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
SECTIONS = dict(re.findall(r"^## (.+)\n\n((?:(?!^## ).*\n?)*)", PAGE, re.MULTILINE))
NAMED = re.compile(r"^<!-- results: (.+) -->$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.,])[0-9][0-9,]*(?:\.[0-9]+)?(?![\w]|[.,][0-9])")


def files_of(section: str) -> list[Path]:
    named = NAMED.search(SECTIONS[section])
    return [RESULTS / f"{name}.json" for name in named[1].split()] if named else []


def figures_in(text: str) -> list[str]:
    """The numbers in the tables' cells, but for their heads and first columns."""
    figures = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            cells = re.sub(r"`[^`]*`", "", line).strip("|").split("|")
            figures += [number.replace(",", "") for cell in cells[1:] for number in NUMBER.findall(cell)]
    return figures


def numbers(stored: Any) -> Iterator[Decimal]:
    """All numbers in the file's values and keys, but for lists, which hold raw measurements."""
    if isinstance(stored, dict):
        for key, value in stored.items():
            yield from map(Decimal, re.findall(r"\d+(?:\.\d+)?", key))
            yield from numbers(value)
    elif isinstance(stored, int | float) and not isinstance(stored, bool):
        yield Decimal(repr(stored))


def rounds_to(number: Decimal, figure: str, factors: tuple[int, ...] = (1, 100, 1000)) -> bool:
    step = Decimal(1).scaleb(Decimal(figure).as_tuple().exponent)  # type: ignore[arg-type]
    return any(abs((number * factor).quantize(step, ROUND_HALF_EVEN)) == Decimal(figure) for factor in factors)


def test_every_section_has_its_files() -> None:
    assert [section for section in SECTIONS if not files_of(section)] == []
    named = {file for section in SECTIONS for file in files_of(section)}
    assert named == set(RESULTS.glob("*.json"))


@pytest.mark.parametrize("section", SECTIONS)
def test_figures_are_those_of_the_files(section: str) -> None:
    stored = [json.loads(file.read_text()) for file in files_of(section)]
    known = {number for one in stored for number in numbers({**one, "about": None})}
    wrong = [figure for figure in figures_in(SECTIONS[section]) if not any(rounds_to(n, figure) for n in known)]
    assert figures_in(SECTIONS[section])
    assert wrong == []


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_files_say_where_they_come_from(file: Path) -> None:
    about = json.loads(file.read_text())["about"]
    assert (ROOT / about["command"].split()[0]).is_file()
    assert {"environment", "date", "commit", "cores", "versions", "load_before", "load_after", "busy"} <= set(about)


def test_benchmarks_find_what_they_import() -> None:
    programs = [program.stem for program in (ROOT / "benchmarks").glob("*.py")]
    importing = f"import importlib\nfor name in {programs}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", importing], cwd=ROOT / "benchmarks", check=True, timeout=120)


def test_figures_of_the_readme_stand_on_the_page() -> None:
    known = [Decimal(number.replace(",", "")) for number in NUMBER.findall(PAGE)]
    readme = figures_in((ROOT / "README.md").read_text())
    assert len(readme) > 30
    assert [figure for figure in readme if not any(rounds_to(number, figure, (1,)) for number in known)] == []
