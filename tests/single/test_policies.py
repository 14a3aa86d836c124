"""Policies: their names, their arguments, and what the core is told of them."""

import math
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from horovod_partial import _core, policies
from horovod_partial.exchange.arguments import warn_of_policy
from horovod_partial.policies import (
    Butterfly,
    Full,
    GroupAverage,
    Majority,
    PartialReduce,
    Policy,
    Quorum,
    Schedule,
    Solo,
    WeightedAverage,
    WorkSharing,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full", Full()),
        ("solo", Solo()),
        ("majority", Majority()),
        ("majority:random", Majority(initiator="random")),
        ("majority:random,3", Majority("random", 3)),
        ("majority:max_staleness=4", Majority(max_staleness=4)),
        ("solo:missed=latest,replay_limit=4,grace_ms=0", Solo(missed="latest", replay_limit=4, grace_ms=0)),
        ("quorum:3", Quorum(3)),
        ("quorum:0.75", Quorum(0.75)),
        ("quorum:1.0", Quorum(1.0)),
        ("quorum:0.75,grace_ms=2.5", Quorum(0.75, grace_ms=2.5)),
        ("quorum:grace_ms=auto,ranks=2", Quorum(2)),
        ("group_average", GroupAverage()),
        ("group_average:4", GroupAverage(4)),
        ("group_average:4,period=none, overlap=true", GroupAverage(4, None, overlap=True)),
        ("partial_reduce:4,overlap=gradient", PartialReduce(4, overlap="gradient")),
        ("group_average:period=20,max_staleness=2", GroupAverage(period=20, max_staleness=2)),
        ("partial_reduce:3", PartialReduce(3)),
        ("partial_reduce:3,weights=staleness,alpha=0.5", PartialReduce(3, "staleness", 0.5)),
        ("weighted_average:8,contraction=0.999", WeightedAverage(8, 0.999)),
        ("weighted_average:8,0.999", WeightedAverage(8, 0.999)),
        (" Solo ", Solo()),
    ],
)
def test_parse(text: str, expected: policies.Policy) -> None:
    parsed = policies.parse(text)
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize("text", ["", "most", "partial", "group", "quorums:1", "full=1"])
def test_unknown_names_say_what_is_known(text: str) -> None:
    known = "known are full, solo, majority, .*, weighted_average"
    with pytest.raises(ValueError, match=rf"^unknown sync policy '{text}'; {known}$"):
        policies.parse(text)


ABOUT_LATE_GRADIENTS = "max_staleness=8, grace_ms=auto, missed=replay, replay_limit=8"
ABOUT_MAJORITY = f"majority takes initiator=none, seed=0, {ABOUT_LATE_GRADIENTS}"
ABOUT_PARTIAL_REDUCE = "partial_reduce takes SIZE, weights=constant, alpha=0.9, overlap=false"
ABOUT_WEIGHTED_AVERAGE = "weighted_average takes PERIOD, CONTRACTION, overlap=false"
NO_GRACE = "grace_ms must be 'auto' or a number of milliseconds, 0 to 31536000000, not"


@pytest.mark.parametrize(
    ("text", "cause", "remedy"),
    [
        ("full:1", "'1' has no key", "full takes nothing"),
        ("full:max_staleness=1", "there is no 'max_staleness'", "full takes nothing"),
        ("solo:2", "'2' has no key", f"solo takes {ABOUT_LATE_GRADIENTS}"),
        ("solo:missed=sum", "missed must be 'replay' or 'latest', not 'sum'", f"solo takes {ABOUT_LATE_GRADIENTS}"),
        ("majority:staleness=4", "there is no 'staleness'", ABOUT_MAJORITY),
        ("quorum", "ranks must be given", f"quorum takes RANKS, {ABOUT_LATE_GRADIENTS}"),
        ("quorum:grace_ms=-1", "ranks must be given", ""),
        ("quorum:2,ranks=3", "ranks is given twice", ""),
        ("quorum:2,", "'' has no key", ""),
        ("quorum:2,grace_ms=-1", f"{NO_GRACE} -1", ""),
        ("quorum:2,grace_ms=soon", f"{NO_GRACE} 'soon'", ""),
        ("quorum:x", "ranks must be an int or a float, not 'x'", ""),
        ("quorum:0", "ranks must be 1 or more, not 0", ""),
        ("quorum:0.0", "a share of the ranks must be above 0 and at most 1, not 0.0", ""),
        ("quorum:1.5", "a share of the ranks must be above 0 and at most 1, not 1.5", ""),
        ("quorum:-1", "ranks must be 1 or more, not -1", ""),
        ("quorum:nan", "a share of the ranks must be above 0 and at most 1, not nan", ""),
        ("majority:fast", "initiator must be None or 'random', not 'fast'", ""),
        (
            f"majority:max_staleness={2**31}",
            rf"max_staleness must be an int, 0 or more and below 2\*\*31, not {2**31}",
            "",
        ),
        ("group_average:1", "size must be an int, 2 or more, not 1", ""),
        ("group_average:x", "size must be an int, 2 or more, not 'x'", ""),
        ("group_average:2.0", "size must be an int, 2 or more, not 2.0", ""),
        (
            "group_average:2,schedule=ring",
            "there is no 'schedule'",
            "group_average takes size=none, period=10, overlap=false, max_staleness=8, grace_ms=auto",
        ),
        ("partial_reduce", "size must be given", ABOUT_PARTIAL_REDUCE),
        ("partial_reduce:0.5", "size must be an int, 2 or more, not 0.5", ""),
        ("partial_reduce:2,max_staleness=3", "there is no 'max_staleness'", ""),
        ("weighted_average", "period and contraction must be given", ABOUT_WEIGHTED_AVERAGE),
        ("weighted_average:8", "contraction must be given", ""),
        ("weighted_average:8,0", "contraction must be a number above 0 and at most 1, not 0", ""),
        ("weighted_average:0,0.9", "period must be an int, 1 or more, not 0", ""),
    ],
)
def test_wrong_arguments_are_named(text: str, cause: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"^invalid sync policy '{text}': {cause}; .*{remedy}$"):
        policies.parse(text)


def test_resolve() -> None:
    assert policies.resolve(None, "solo") == Solo()
    assert policies.resolve("majority", "solo") == Majority()
    assert policies.resolve(Quorum(2), "solo") == Quorum(2)
    assert policies.resolve(None, Full()) == Full()
    with pytest.raises(ValueError, match=r"sync must be a policy such as hvd.Majority\(\), or its name, not 3"):
        policies.resolve(3, "solo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sync must be a policy"):
        policies.resolve(Solo, "solo")  # type: ignore[arg-type]


def test_one_rank_is_not_all_ranks() -> None:
    assert Quorum(1) != Quorum(1.0)
    assert hash(Quorum(1)) != hash(Quorum(1.0)) or Quorum(1) != Quorum(1.0)
    assert Quorum(1).to_core(8).quorum == 1
    assert Quorum(1.0).to_core(8).quorum == 8


@pytest.mark.parametrize(("size", "quorum"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (8, 4)])
def test_majority_is_at_least_half(size: int, quorum: int) -> None:
    assert Majority().to_core(size) == _core.Policy(rule="quorum", quorum=quorum)


def test_rules() -> None:
    assert Solo().to_core(4) == _core.Policy(rule="quorum", quorum=1)
    assert Majority(initiator="random", seed=7).to_core(4) == _core.Policy(rule="initiator", quorum=1, seed=7)
    assert Majority(initiator="random", seed=-1).to_core(4).seed == 2**64 - 1
    assert Quorum(3).to_core(4).quorum == 3
    assert Quorum(9).to_core(4).quorum == 4  # more than there are means all
    with pytest.raises(TypeError, match="no rounds of its own"):
        Full().to_core(4)


def test_bounds() -> None:
    for policy in (Solo, Majority, partial(Quorum, 3), GroupAverage):
        core = policy(max_staleness=0, grace_ms=2.5).to_core(4)
        assert (core.max_staleness, core.grace_seconds) == (0, 2.5e-3)
        assert policy().to_core(4).max_staleness == 8
        with pytest.raises(ValueError, match="max_staleness must be an int, 0 or more, not -1"):
            policy(max_staleness=-1)
        with pytest.raises(ValueError, match=f"{NO_GRACE} nan"):
            policy(grace_ms=math.nan)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (Quorum(3), "Quorum(ranks=3)"),
        (Majority("random", max_staleness=4), "Majority(initiator='random', max_staleness=4)"),
        (Solo(missed="latest", replay_limit=4, grace_ms=0), "Solo(grace_ms=0, missed='latest', replay_limit=4)"),
        (WeightedAverage(8, 0.9), "WeightedAverage(period=8, contraction=0.9)"),
    ],
)
def test_what_is_shown_of_a_policy(policy: policies.Policy, text: str) -> None:
    assert repr(policy) == text
    assert eval(text, vars(policies)) == policy


@given(share=st.floats(min_value=0.0, max_value=1.0, exclude_min=True), size=st.integers(1, 2048))
def test_a_share_is_never_nobody_and_never_more_than_all(share: float, size: int) -> None:
    quorum = Quorum(share).to_core(size).quorum
    assert 1 <= quorum <= size
    assert quorum >= share * size - 1e-6


MODEL_POLICIES = [
    GroupAverage(),
    GroupAverage(4, period=None),
    GroupAverage(schedule=Butterfly(3), average=("parameters", "buffers", "state")),
    PartialReduce(2),
    PartialReduce(3, weights="staleness", alpha=0.5),
    WeightedAverage(8, 0.999),
]


OTHER_POLICIES = [Full(), Solo(), Majority(), Majority("random")]


@given(policy=st.sampled_from([*OTHER_POLICIES, *MODEL_POLICIES]) | st.integers(1, 99).map(Quorum))
def test_policies_are_values(policy: policies.Policy) -> None:
    assert policies.resolve(policy, "full") == policy
    assert len({policy, policies.resolve(policy, "full")}) == 1


# --- Policies of models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: GroupAverage(True), "size must be an int"),
        (lambda: GroupAverage(period=0), "period must be an int, 1 or more"),
        (lambda: GroupAverage(period=2.5), "period must be an int"),
        (lambda: GroupAverage(2, schedule=Butterfly(2)), "size or schedule, not both"),
        (lambda: GroupAverage(schedule="ring"), "hvd.Butterfly"),
        (lambda: GroupAverage(schedule=Butterfly), "hvd.Butterfly"),
        (lambda: PartialReduce(1), "size must be an int, 2 or more"),
        (lambda: PartialReduce("2"), "size must be an int"),
        (lambda: PartialReduce(2, weights="uniform"), "weights must be 'constant' or 'staleness'"),
        (lambda: PartialReduce(2, alpha=0.0), "alpha must be a number above 0 and at most 1"),
        (lambda: PartialReduce(2, alpha=1.5), "alpha must be a number above 0 and at most 1"),
        (lambda: PartialReduce(2, alpha=math.nan), "alpha must be a number above 0 and at most 1"),
        (lambda: WeightedAverage(1.0, 0.9), "period must be an int"),
        (lambda: WeightedAverage(1, 1.01), "contraction must be a number above 0 and at most 1"),
        (lambda: WeightedAverage(1, math.nan), "contraction must be a number above 0 and at most 1"),
        (lambda: Butterfly(1), "size must be an int, 2 or more"),
        (lambda: Butterfly(None), "size must be an int"),
        (lambda: Schedule(3, 1), "function must be callable"),
        (lambda: Schedule(lambda round, rank: 0, 0), "rounds must be an int, 1 or more"),
        (lambda: Schedule(lambda round, rank: 0, 1.0), "rounds must be an int"),
        (lambda: GroupAverage(2**31), "size must be an int, 2 or more and below 2[*][*]31, not 2147483648"),
        (lambda: GroupAverage(average=None), "average must hold 'parameters'"),
        (lambda: GroupAverage(average=3), "average must hold 'parameters'"),
        (lambda: GroupAverage(overlap="no"), "overlap must be True, False or 'gradient', not 'no'"),
        (lambda: GroupAverage(average=("parameters", "buffers"), overlap="gradient"), "cannot average buffers"),
        (lambda: PartialReduce(2, overlap=[]), "overlap must be True, False or 'gradient'"),
        (lambda: PartialReduce(2, alpha="1"), "alpha must be a number"),
        (lambda: PartialReduce(2, alpha=True), "alpha must be a number"),
        (lambda: WeightedAverage(1, None), "contraction must be a number"),
        (lambda: WeightedAverage(1, 0.9, overlap=2), "overlap must be True, False or 'gradient'"),
        (lambda: Majority("random", seed=None), "seed must be an int, not None"),
        (lambda: Majority(True), "initiator must be None or 'random', not True"),
        (lambda: Solo(replay_limit=1), "replay_limit must be an int, 2 or more, not 1"),
        *((partial(Quorum, ranks), "ranks must be an int or a float") for ranks in (True, "3", None, [1])),
    ],
)
def test_wrong_arguments(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("policy", [GroupAverage, partial(PartialReduce, 2), partial(WeightedAverage, 2, 0.9)])
def test_what_is_averaged(policy: Any) -> None:
    assert policy().average == ("parameters",)
    assert policy(average="parameters").average == ("parameters",)
    everything = policy(average=["parameters", "buffers", "state"])
    assert everything.average == ("parameters", "buffers", "state")
    hash(everything)
    for wrong in ("buffers", (), ("state",), ("parameters", "gradients"), ("parameters", "step")):
        with pytest.raises(ValueError, match="average must hold 'parameters', and may hold 'buffers' and 'state'"):
            policy(average=wrong)


@pytest.mark.parametrize(
    ("size", "group"),
    [(1, 2), (2, 2), (3, 2), (4, 2), (8, 2), (15, 2), (16, 4), (63, 4), (64, 8), (100, 8), (1024, 32)],
)
def test_the_default_size_is_a_power_of_two_up_to_the_square_root(size: int, group: int) -> None:
    """At least 2, so that there is a group at all."""
    assert GroupAverage().schedule_for(size) == Butterfly(group)


def test_rules_of_model_policies() -> None:
    def butterfly(size: int) -> _core.Schedule:
        return _core.Schedule(kind="butterfly", group_size=size)

    assert GroupAverage().to_core(8) == _core.Policy(quorum=1, schedule=butterfly(2), period=10)
    assert GroupAverage(16, period=None).to_core(8) == _core.Policy(quorum=1, schedule=butterfly(8), period=0)
    assert GroupAverage(schedule=Butterfly(3)).to_core(8) == _core.Policy(quorum=1, schedule=butterfly(3), period=10)
    table = GroupAverage(schedule=Schedule(lambda round, rank: (rank + round) // 2, 2)).to_core(4).schedule
    assert (table.kind, table.table) == ("table", [[0, 0, 1, 1], [0, 1, 1, 2]])
    assert PartialReduce(3).to_core(8) == _core.Policy(rule="ready", group_size=3, window=16)
    assert PartialReduce(9).to_core(8) == _core.Policy(rule="ready", group_size=8, window=16)
    assert WeightedAverage(8, 0.9).to_core(8) == _core.Policy(quorum=8, max_staleness=2**31 - 1)


def test_what_becomes_of_models() -> None:
    assert GroupAverage().bucket_options() == {"late": "keep"}
    assert PartialReduce(2).bucket_options() == {"late": "discard"}
    weighted = {"late": "discard", "weights": "staleness", "weight_parameter": 0.8}
    assert PartialReduce(2, weights="staleness", alpha=0.8).bucket_options() == weighted
    by_work = {"late": "discard", "weights": "contraction", "weight_parameter": 0.9}
    assert WeightedAverage(8, 0.9).bucket_options() == by_work


def test_descriptions_differ_where_the_groups_do() -> None:
    """They are compared between ranks, on which a function has another address."""
    for policy in MODEL_POLICIES:
        assert policies.describe(policy, 4) == repr(policy)

    def described(function: Any, rounds: int = 2) -> str:
        return policies.describe(GroupAverage(schedule=Schedule(function, rounds)), 4)

    assert described(lambda round, rank: rank // 2) == described(lambda round, rank: f"pair {rank // 2}")
    assert "0x" not in described(lambda round, rank: rank // 2)
    different = [
        described(lambda round, rank: rank // 2),
        described(lambda round, rank: rank % 2),
        described(lambda round, rank: (rank + round) // 2),
        described(lambda round, rank: rank // 2, rounds=3),
    ]
    assert len(set(different)) == len(different)


# --- Schedules --------------------------------------------------------------------------------------------------------


def test_groups_of_a_schedule() -> None:
    schedule = Schedule(lambda round, rank: ("odd", "even")[rank % 2] if round else rank // 3, 2)
    assert schedule.groups(0, 4) == [[0, 1, 2], [3]]
    assert schedule.groups(1, 4) == [[0, 2], [1, 3]]
    assert schedule.groups(4, 4) == schedule.groups(0, 4)  # from the start again
    assert schedule.groups(1, 1) == [[0]]
    assert Butterfly(4).groups(1, 8) == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]  # WAGMA-SGD's example; test_schedule.cc has it whole
    ring = Schedule(lambda round, rank: (rank - round) % 4 // 2, 4)
    assert [ring.groups(t, 4) for t in range(3)] == [[[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0, 1], [2, 3]]]


def of_rank(rank: int) -> Any:
    """A stand-in for the runtime of one of 4 ranks."""
    return SimpleNamespace(is_initialized=lambda: True, rank=lambda: rank, size=lambda: 4)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Muon])
def test_an_optimizer_that_bears_late_gradients_badly_is_told(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([torch.zeros(1, 1)])
    with pytest.warns(UserWarning, match=rf"{kind.__name__} under .*: most gradients may be late"):
        warn_of_policy(of_rank(0), Solo(), optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_policy(of_rank(0), Majority(), optimizer, 1)
        warn_of_policy(of_rank(0), Solo(), torch.optim.SGD([torch.zeros(1)], lr=0.1), 1)
        warn_of_policy(of_rank(1), Solo(), optimizer, 1)


@pytest.mark.parametrize(
    ("policy", "passes", "message"),
    [(Quorum(75), 1, "asks for 75 ranks, and there are 4"), (WorkSharing(), 1, "a single micro-batch for each rank")],
)
def test_a_policy_that_waits_for_all_is_told(policy: Policy, passes: int, message: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.warns(UserWarning, match=message):
        warn_of_policy(of_rank(0), policy, optimizer, passes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_policy(of_rank(1), policy, optimizer, passes)
        warn_of_policy(of_rank(0), Quorum(4), optimizer, 1)
        warn_of_policy(of_rank(0), WorkSharing(), optimizer, 2)
