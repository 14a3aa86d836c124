"""Measured figures of README.md and docs are those of stored results: texts in benchmarks/pages name them, and none is written by hand."""

import copy
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))

import write_pages

PAGES = write_pages.Pages()
STORED = write_pages.stored()
TEXTS = {file.relative_to(write_pages.PAGES).as_posix(): file.read_text() for file in write_pages.PAGES.glob("**/*.md")}
OTHERS = {f"docs/{file.name}": file.read_text() for file in (ROOT / "docs").glob("*.md")}
OTHERS = {name: text for name, text in OTHERS.items() if name not in (*TEXTS, "docs/papers.md", "docs/versions.md")}
CHANGES = 100

NUMBERS = r"\d[\d,]*(?:(?:, | and | or | to | of )\d[\d,]*)*"
COUNTED = "ranks|cores|steps|iterations|rounds?|epochs|micro-batches|(?:backward )?passes|buckets|arrivals|closings"
# What README.md and docs/benchmarks.md have beside measured figures.
EXCEPTIONS = {
    r"`[^`]+`": "code: names, commands and settings",
    r"\]\([^)]*\)|https?://\S+|<!--.*?-->": "addresses and comments",
    r"(?:Horovod|PyTorch|TensorFlow|Keras|Python|Open MPI|Apache) [\d.]*\d|Horovod's issue \d+|November \d+": "versions and dates",
    r"ResNet-50(?:'s 161)?": "the name of a model, and how many tensors it has",
    rf"{NUMBERS}(?:th)? (?:random )?(?:{COUNTED})\b": "how large a job is",
    rf"{NUMBERS} (?:B|KB|KiB|MB|Mbit/s|Gbit/s)\b|200 tensors|batches of \d+|groups of \d+": "messages, links and batches",
    r"rank 0|K = \d|300 of each rank|all 32|[Mm]edians of 5": "which rank, which share, how often",
    r"0\.25, 0\.5, 1 and 2\.25|sigma 0\.5|(?:always|rank) [\d.]+ times slower|half 1\.7 times slower": "delays that benchmarks make",
    r"sleeping 5, 10, 20 and 45 ms|delayed by 40 ms|40 ms of work|5 ms apart|\d+ m?s of backward|cycles of 1 ms": "the same",
    r"steps of 0\.1 s|0\.2 s for the shortest": "the same",
    r"1\.00 is as fast as|2\.00 takes half|more than 2 %|95 % intervals|with \d\d % of the steps": "what figures mean",
    r"p < 0\.05|within 10 %": "what figures mean",
}
# The other pages may have numbers, but none with such a unit that was measured.
WITH_UNIT = re.compile(r"(?<![\w.])\d[\d.,]*(?: (?:%|ms|s|µs|times|points?|seconds|minutes|hours)(?!\w)|%)")
EXCEPTIONS_ELSEWHERE = EXCEPTIONS | {
    r"\b(?:after|for|within|than|of|most|last|to|longer of) (?:\d+ to )?\d+ (?:ms|s|seconds)\b": "limits and intervals",
    r"\| (?:10|20|60) s\b|\((?:1 ms|30 s|20 s without)|\d+ s after|take 0\.1 ms|may take 30 s|timeout, 30 s|by 0\.3 s|60 s late": "the same",
    r"8 %, or by|40, 15 and 6 %|1 % of the steps|20 times the length|10 times the longest|1\.5 times slower or": "rules of the protocol",
    r"longer by 10 %|unless 90 %|sum for 40 %|While 70 %|4 or 64 times|1,000 times|cost 2 %|1\.5 times the longest|1\.1 times": "the same",
    r"95 % interval|than 75 %|below 75 %|5 % of the median|100 times a second": "rules of other parts, and of Horovod",
    r"pauses for 5\.0 s|for 71 %|\"80 % of": "examples of messages",
    r"loses 5 % of all|takes (?:1\.6|3) times as long|2\.5 times|2\.25 times as long|8 ms of messages": "what a test or an example does",
    r"[\d.]+ d under|arXiv [\d.]+|0\.0 on|0\.25, 0\.5, 1, ": "arithmetic, addresses, arguments",
    r"\b\d+ MiB\b": "sizes",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_is_what_its_text_and_the_results_make(name: str) -> None:
    assert PAGES.write(STORED)[name] == (ROOT / name).read_text(), "run benchmarks/write_pages.py"


def outside_of_expressions(text: str) -> str:
    """What a text says itself; also words and numbers within expressions, but for names of what is in the results."""
    parts, names = [], set(names_in(STORED))
    for _, kind, value in jinja2.Environment().lex(text):
        if kind == "data":
            parts.append(value)
        elif kind == "string" and value[1:-1] not in names:
            parts.append(f"\n{value[1:-1]}\n")
        elif kind == "float" or (kind == "integer" and value not in ("0", "1", "2", "3", "100", "1000")):
            parts.append(f" {value} ")  # the others are decimals, places and factors
        elif kind in ("variable_end", "block_end"):
            parts.append("…")
    return "".join(parts)


def names_in(stored: Any) -> Iterator[str]:
    if isinstance(stored, dict):
        yield from stored
        for value in stored.values():
            yield from names_in(value)


def without(text: str, exceptions: dict[str, str]) -> str:
    """The text in one line, without code blocks and what may stand there."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\s+", " ", text)
    for pattern in exceptions:
        text = re.sub(pattern, "…", text)
    return text


def found(pattern: re.Pattern[str], text: str) -> list[str]:
    return [text[max(0, place.start() - 40) : place.end() + 20] for place in pattern.finditer(text)]


@pytest.mark.parametrize("name", TEXTS)
def test_no_figure_is_written_by_hand(name: str) -> None:
    strict = name in ("README.md", "docs/benchmarks.md")
    text = without(outside_of_expressions(TEXTS[name]), EXCEPTIONS if strict else EXCEPTIONS_ELSEWHERE)
    assert found(re.compile(r"\d[\d.,]*") if strict else re.compile(rf"\d+\.\d+|{WITH_UNIT.pattern}"), text) == []


@pytest.mark.parametrize("name", OTHERS)
def test_pages_without_figures_have_none(name: str) -> None:
    assert found(WITH_UNIT, without(OTHERS[name], EXCEPTIONS_ELSEWHERE)) == []


Place = tuple[str | int, ...]


class ReadDict(dict[str, Any]):
    """Notes the places of the numbers that are read."""

    def __init__(self, of: dict[str, Any], place: Place, read: set[Place]) -> None:
        super().__init__(of)
        self._place, self._read = place, read

    def __getitem__(self, key: str) -> Any:
        return noted(super().__getitem__(key), (*self._place, key), self._read)

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


class ReadList(list[Any]):
    """Notes the places of the numbers that are read."""

    def __init__(self, of: list[Any], place: Place, read: set[Place]) -> None:
        super().__init__(of)
        self._place, self._read = place, read

    def __getitem__(self, index: Any) -> Any:
        return noted(super().__getitem__(index), (*self._place, index), self._read)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


def noted(value: Any, place: Place, read: set[Place]) -> Any:
    if isinstance(value, dict):
        return ReadDict(value, place, read)
    if isinstance(value, list):
        return ReadList(value, place, read)
    if isinstance(value, int | float):
        read.add(place)
    return value


def places_read() -> list[Place]:
    read: set[Place] = set()
    PAGES.write({name: noted(value, (name,), read) for name, value in STORED.items()})
    return sorted(read, key=str)


def changed(value: float) -> Iterator[float]:
    """By 10 % up and down, and then by more: figures are rounded, and of some the largest is published."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, value + 100, 0)
    else:
        yield from (value * factor for factor in (1.1, 0.9, 1.5, 0.5, 10.0, 0.1, 100.0, -1.0) if value)
        yield from (value + step for step in (1.0, 100.0))


def is_noticed(place: Place, pages: dict[str, str]) -> bool:
    """Whether a change of the number there changes the pages, or lets them fail."""
    name, *inner, last = place
    results = {**STORED, str(name): copy.deepcopy(STORED[str(name)])}
    parent = results[str(name)]
    for key in inner:
        parent = parent[key]
    for value in changed(parent[last]):
        parent[last] = value
        try:
            if PAGES.write(results) != pages:
                return True
        except (ArithmeticError, LookupError, ValueError):
            return True
    return False


def test_a_changed_result_changes_a_page() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    drawn = random.Random(seed).sample(places_read(), CHANGES)
    pages = PAGES.write(STORED)
    assert [place for place in drawn if not is_noticed(place, pages)] == []


def named_in_expressions(text: str) -> set[str]:
    tokens = jinja2.Environment().lex(text)
    return {value.strip("\"'") for _, kind, value in tokens if kind in ("name", "string")}


@pytest.mark.parametrize("name", STORED)
def test_pages_mark_what_was_not_measured_quietly(name: str) -> None:
    """All files of README.md and docs/benchmarks.md, and on the other pages those that other programs ran beside."""
    about = STORED[name]["about"]
    pages = {"README.md", "docs/benchmarks.md", *(TEXTS if about["busy"] else ())}
    other = {**STORED, name: {**STORED[name], "about": {**about, "busy": not about["busy"]}}}
    now, then = PAGES.write(STORED), PAGES.write(other)
    assert [page for page in pages if name in named_in_expressions(TEXTS[page]) and now[page] == then[page]] == []


# The quantiles are those of printed tables: 4.30 with 2 degrees of freedom, 2.78 with 4.
@pytest.mark.parametrize(
    ("difference", "seeds", "word"),
    [
        (4.31, 3, "ahead"),
        (4.30, 3, "level"),
        (2.78, 5, "ahead"),
        (2.77, 5, "level"),
        (0.0, 5, "level"),
        (-2.77, 5, "level"),
        (-2.78, 5, "behind"),
    ],
)
def test_verdict(difference: float, seeds: int, word: str) -> None:
    assert write_pages.verdict(difference, 1.0, seeds) == word


def test_one_seed_has_no_verdict() -> None:
    with pytest.raises(ValueError, match="two seeds"):
        write_pages.verdict(1.0, 0.0, 1)


def trained(at_the_edge: list[str], quality: str) -> dict[str, Any]:
    of = {"seconds_by_seed": [1.0] * 3, "quality_by_seed": [90.0, 91.0, 92.0]}
    return {
        "quality": quality,
        "at_the_edge": at_the_edge,
        "arms": {"full": of, "solo": of | {"ahead": 1.0, "ahead_error": 0.1}},
    }


@pytest.mark.parametrize("edge", ["full", "solo"])
def test_a_rate_at_the_edge_of_its_grid_is_not_compared(edge: str) -> None:
    program = trained([edge], "accuracy")
    told = f"not compared (edge: `{edge.capitalize()}()`)"
    assert write_pages.in_the_same_time(program, "solo") == write_pages.after_as_many_steps(program, "solo") == told


@pytest.mark.parametrize(
    ("quality", "solo", "told"),
    [
        ("accuracy", [91.1, 91.9, 93.0], "ahead (1.0 ± 0.1 points)"),
        ("accuracy", [89.1, 89.9, 91.0], "behind (1.0 ± 0.1 points)"),
        ("perplexity", [91.0, 92.0, 92.9], "behind (1.1 ± 0.0 %)"),
        ("perplexity", [89.0, 90.1, 91.1], "ahead (1.0 ± 0.0 %)"),
        ("return", [89.7, 91.0, 91.7], "level (-0.2 ± 0.1)"),
    ],
)
def test_after_as_many_steps(quality: str, solo: list[float], told: str) -> None:
    """Seed by seed, in percent of the other's."""
    program = trained([], quality)
    program["arms"]["solo"]["quality_by_seed"] = solo
    assert write_pages.after_as_many_steps(program, "solo") == told


def test_two_arms_compared_without_full() -> None:
    program = trained(["full"], "accuracy")
    program["arms"]["majority"] = {"quality_by_seed": [93.0, 94.0, 95.0]}
    assert write_pages.after_as_many_steps(program, "majority", 1, "solo") == "ahead (3.0 ± 0.0 points)"


def test_within() -> None:
    assert write_pages.within([0.89, 0.9, 1.0, 1.11]) == 0.5


def test_no_figure_without_a_format() -> None:
    environment = write_pages.Pages.environment()
    for text in ("{{ 0.5 }}", "{{ none }}", "{{ nothing }}", "{{ nothing | fixed }}"):
        with pytest.raises((ValueError, TypeError, jinja2.UndefinedError)):
            environment.from_string(text).render()


def test_every_section_has_its_files() -> None:
    page = PAGES.write(STORED)["docs/benchmarks.md"]
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    named = [re.search(r"^<!-- results: (.+) -->$", section, re.MULTILINE) for section in sections]
    assert {name for found in named if found for name in found[1].split()} == {
        file.stem for file in RESULTS.glob("*.json")
    }
    assert all(named)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_files_say_where_they_come_from(file: Path) -> None:
    about = json.loads(file.read_text())["about"]
    assert (ROOT / about["command"].split()[0]).is_file()
    assert {"environment", "date", "commit", "cores", "versions", "load_before", "load_after", "busy"} <= set(about)


def test_benchmarks_find_what_they_import() -> None:
    programs = [program.stem for program in (ROOT / "benchmarks").glob("*.py")]
    importing = f"import importlib\nfor name in {programs}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", importing], cwd=ROOT / "benchmarks", check=True, timeout=120)
