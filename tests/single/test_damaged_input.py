"""Texts and files that users write, or that something has damaged: what cannot be read is a ValueError, and nothing else."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import synthetic_recordings as synthetic
from hypothesis import example, given
from hypothesis import strategies as st

from horovod_partial import policies
from horovod_partial.insight import recording
from horovod_partial.insight.report import Summary
from horovod_partial.insight.simulate import RecordedSteps, Trace, parse_delays
from horovod_partial.merging import MergingPlan, MessageCost
from horovod_partial.settings import Settings

# Texts near what can be read, and any other.
WORDS = ["solo", "majority", "quorum", "random", "full", "group_average", "partial_reduce", "weighted_average", "ranks"]
near = st.lists(st.one_of(st.sampled_from([*WORDS, ":", "0.5", "3", "-1", "nan", "inf", "1e400", " "])), max_size=6)
texts = st.one_of(st.text(max_size=40), near.map("".join), near.map(":".join))
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10), inner, max_size=4)),
    max_leaves=12,
)
PLAN = MergingPlan("exact", ("a", "b"), (4, 8), (0.0, 0.1), (1, 1), MessageCost(1e-4, 1e-9), around=0.2, measured=0.3)
DOCUMENTS = [asdict(PLAN), asdict(Trace.even(2, 4, 0.1, 0.2))]


@given(texts)
def test_policies(text: str) -> None:
    with suppress(ValueError):
        policy = policies.parse(text)
        assert isinstance(policy, policies._Policy)


@given(texts)
@example("random:inf:0")
def test_delays(text: str) -> None:
    with suppress(ValueError):
        parse_delays(text)


@given(st.sampled_from(sorted(Settings.model_fields)), texts)
def test_settings(name: str, text: str) -> None:
    with suppress(ValueError):  # which pydantic's error is
        Settings(**{name: text})


def spoiled(document: Any, draw: Any) -> Any:
    """A document in which one thing is another."""
    if isinstance(document, dict) and document and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(document)))
        return {**document, key: spoiled(document[key], draw)}
    if isinstance(document, (list, tuple)) and document and draw(st.booleans()):
        return [spoiled(document[0], draw), *document[1:]]
    return draw(values)


@given(data=st.data(), raw=st.one_of(st.none(), st.binary(max_size=60)))
def test_files_of_plans_and_traces(tmp_path_factory: Any, data: st.DataObject, raw: bytes | None) -> None:
    file: Path = tmp_path_factory.mktemp("damaged") / "file.json"
    document = spoiled(data.draw(st.sampled_from(DOCUMENTS)), data.draw)
    file.write_bytes(raw if raw is not None else json.dumps(document).encode())
    for load in (MergingPlan.load, Trace.load):
        with suppress(ValueError):
            load(file)


@given(rows=st.lists(texts, max_size=3), raw=st.one_of(st.none(), st.binary(max_size=60)))
@example(rows=["0,10000000000,1"], raw=None)
@example(rows=["0,0," + "1" * 140_000], raw=None)
def test_files_of_steps(tmp_path_factory: Any, rows: list[str], raw: bytes | None) -> None:
    file: Path = tmp_path_factory.mktemp("damaged") / "steps.csv"
    file.write_bytes(raw if raw is not None else "\n".join(["step,rank,seconds", *rows]).encode("utf-8", "ignore"))
    with suppress(ValueError):
        RecordedSteps.load(file)


@pytest.fixture(scope="module", params=[None, 2], ids=["full", "quorum"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = synthetic.Job(synthetic.even(12, 2), request.param, hosts=[synthetic.Host("a"), synthetic.Host("b")])
    return synthetic.write(tmp_path_factory.mktemp("recorded"), job)


@given(data=st.data(), rank=st.integers(0, 1))
def test_recordings(recorded: Path, data: st.DataObject, rank: int) -> None:
    file = recorded / f"rank-{rank}.0.jsonl"
    sound = file.read_text()
    lines = [json.loads(line) for line in sound.splitlines()]
    number = data.draw(st.integers(0, len(lines) - 1))
    lines[number] = spoiled(lines[number], data.draw)
    file.write_text("\n".join(map(json.dumps, lines)))
    try:
        Summary.of(recording.load(recorded))
    except ValueError:
        pass
    finally:
        file.write_text(sound)


def test_sound_files_are_read(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan")
    assert MergingPlan.load(tmp_path / "plan") == PLAN
    even = Trace.even(2, 4, 0.1, 0.2)
    even.save(tmp_path / "trace")
    assert Trace.load(tmp_path / "trace") == even
