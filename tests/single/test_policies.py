"""Policies: their names, their arguments, and what the core is told of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_partial import policies
from horovod_partial.policies import Full, Majority, Quorum, Solo


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full", Full()),
        ("solo", Solo()),
        ("majority", Majority()),
        ("majority:random", Majority(initiator="random")),
        ("quorum:3", Quorum(3)),
        ("quorum:0.75", Quorum(0.75)),
        ("quorum:1.0", Quorum(1.0)),
        (" Solo ", Solo()),
    ],
)
def test_parse(text: str, expected: policies.Policy) -> None:
    parsed = policies.parse(text)
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize("text", ["", "most", "quorum", "quorum:", "full:1", "solo:2", "partial"])
def test_unknown_names_say_what_is_known(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"unknown sync policy .*; known are full, solo, majority, majority:random, and quorum:N"
    ):
        policies.parse(text)


@pytest.mark.parametrize(
    "text", ["quorum:x", "quorum:0", "quorum:0.0", "quorum:1.5", "quorum:-1", "quorum:nan", "majority:fast"]
)
def test_wrong_arguments_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="invalid sync policy"):
        policies.parse(text)


@pytest.mark.parametrize("ranks", [True, "3", None, [1]])
def test_quorum_of_a_wrong_type(ranks: object) -> None:
    with pytest.raises(TypeError, match="ranks must be an int or a float"):
        Quorum(ranks)  # type: ignore[arg-type]


def test_resolve() -> None:
    assert policies.resolve(None, "solo") == Solo()
    assert policies.resolve("majority", "solo") == Majority()
    assert policies.resolve(Quorum(2), "solo") == Quorum(2)
    assert policies.resolve(None, Full()) == Full()
    with pytest.raises(TypeError, match=r"sync must be a policy such as hvd.Majority\(\), or its name, not 3"):
        policies.resolve(3, "solo")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sync must be a policy"):
        policies.resolve(Solo, "solo")  # type: ignore[arg-type]


def test_one_rank_is_not_all_ranks() -> None:
    assert Quorum(1) != Quorum(1.0)
    assert hash(Quorum(1)) != hash(Quorum(1.0)) or Quorum(1) != Quorum(1.0)
    assert policies.rule(Quorum(1), 8)["quorum"] == 1
    assert policies.rule(Quorum(1.0), 8)["quorum"] == 8


@pytest.mark.parametrize(("size", "quorum"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (8, 4)])
def test_majority_is_at_least_half(size: int, quorum: int) -> None:
    assert policies.rule(Majority(), size) == {"rule": "quorum", "quorum": quorum, "seed": 0}


def test_rules() -> None:
    assert policies.rule(Solo(), 4) == {"rule": "quorum", "quorum": 1, "seed": 0}
    assert policies.rule(Majority(initiator="random", seed=7), 4) == {"rule": "initiator", "quorum": 1, "seed": 7}
    assert policies.rule(Quorum(3), 4)["quorum"] == 3
    assert policies.rule(Quorum(9), 4)["quorum"] == 4  # more than there are means all
    with pytest.raises(TypeError, match="Horovod's own collective"):
        policies.rule(Full(), 4)


@given(share=st.floats(min_value=0.0, max_value=1.0, exclude_min=True), size=st.integers(1, 2048))
def test_a_share_is_never_nobody_and_never_more_than_all(share: float, size: int) -> None:
    quorum = policies.rule(Quorum(share), size)["quorum"]
    assert 1 <= quorum <= size
    assert quorum >= share * size - 1e-6


@given(policy=st.sampled_from([Full(), Solo(), Majority(), Majority("random")]) | st.integers(1, 99).map(Quorum))
def test_policies_are_values(policy: policies.Policy) -> None:
    assert policies.resolve(policy, "full") == policy
    assert len({policy, policies.resolve(policy, "full")}) == 1
