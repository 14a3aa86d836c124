"""The specification of a bucket: what Python hands to the core in one piece."""

from typing import Any

import pytest

from horovod_partial import _core
from horovod_partial.policies import GroupAverage, PartialReduce, Policy, Quorum, Solo, WeightedAverage, WorkSharing
from horovod_partial.runtime import bucket_config


def spec(**changes: Any) -> _core.BucketSpec:
    return bucket_config.arguments(**{"sync": Solo(), "size": 4, "average": True, **changes})


def test_what_a_gradient_bucket_is_declared_with() -> None:
    made = spec(sync=Quorum(3, max_staleness=5, grace_ms=2.5), prescale_factor=0.5, postscale_factor=3.0)
    words = "Quorum(ranks=3, max_staleness=5, grace_ms=2.5) op=Average"
    policy = _core.Policy(rule="quorum", quorum=3, max_staleness=5, grace_seconds=2.5e-3, description=words)
    assert made == _core.BucketSpec(policy=policy, prescale_factor=0.5, postscale_factor=0.75)
    assert made.policy.description == words


def test_a_process_set_that_is_not_registered() -> None:
    with pytest.raises(ValueError, match="not registered"):
        spec(size=None)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (GroupAverage(2), {"late": "keep"}),
        (PartialReduce(2), {"late": "discard"}),
        (PartialReduce(2, "staleness", 0.5), {"late": "discard", "weights": "staleness", "weight_parameter": 0.5}),
        (WeightedAverage(3, 0.9), {"late": "discard", "weights": "contraction", "weight_parameter": 0.9}),
        (Quorum(1.0), {"late": "discard"}),
    ],
)
def test_what_a_model_bucket_is_declared_with(policy: Policy, expected: dict[str, Any]) -> None:
    made = spec(sync=policy, **bucket_config.of_models(policy))
    assert made == _core.BucketSpec(policy=made.policy, missed="latest", divisor="contributors", **expected)


@pytest.mark.parametrize(
    ("policy", "replayed", "one_result"),
    [(Solo(), "replay", "sum"), (Solo(missed="latest"), "latest", "latest"), (WorkSharing(), "replay", "sum")],
)
def test_what_becomes_of_missed_results(policy: Policy, replayed: str, one_result: str) -> None:
    assert bucket_config.missed_by(policy, replays=True) == replayed
    assert bucket_config.missed_by(policy, replays=False) == one_result


@pytest.mark.parametrize(
    "change",
    [
        {"sync": Quorum(2)},
        {"average": False},
        {"prescale_factor": 0.1},
        {"postscale_factor": 0.1},
        {"sync": Solo(max_staleness=3)},
        {"sync": Solo(grace_ms=0)},
        {"sync": Solo(replay_limit=3)},
        {"missed": "latest"},
        {"divisor": "contributors"},
        {"late": "keep"},
        {"drop_nonfinite": True},
        {"weights": "staleness"},
        {"weight_parameter": 0.1},
    ],
)
def test_whatever_differs_is_another_specification(change: dict[str, Any]) -> None:
    assert spec() == spec()
    assert spec().encode() == spec().encode()
    assert spec(**change) != spec()
    assert spec(**change).encode() != spec().encode()


# --- Classes of the core that list their fields


def test_fields_are_set_and_read_by_name() -> None:
    schedule = _core.Schedule(kind="table", group_size=1, table=[[0, 1]])
    policy = _core.Policy(rule="ready", schedule=schedule, seed=2**64 - 1, grace_seconds=0.25, description="words")
    assert (policy.rule, policy.seed, policy.grace_seconds, policy.description) == ("ready", 2**64 - 1, 0.25, "words")
    assert policy.schedule == schedule
    assert (schedule.kind, schedule.table) == ("table", [[0, 1]])
    assert (policy.quorum, policy.max_staleness, policy.window) == (1, 8, 0)


def test_a_replaced_field_changes_a_copy() -> None:
    policy = _core.Policy(quorum=2)
    assert policy.replace(quorum=3, window=4) == _core.Policy(quorum=3, window=4)
    assert policy == _core.Policy(quorum=2)
    assert policy.replace(grace_seconds=policy.grace_seconds) == policy  # an automatic grace is -1 nanosecond


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"ranks": 1}, TypeError, "there is no field ranks"),
        ({"quorum": "many"}, TypeError, "quorum cannot be 'many'"),
        ({"quorum": 2**31}, TypeError, "quorum cannot be 2147483648"),
        ({"rule": "coin"}, ValueError, "rule must be 'quorum', 'initiator', 'ready' or 'work_sharing'"),
        ({"rule": 1}, TypeError, "rule cannot be 1"),
        ({"schedule": "ring"}, TypeError, "schedule cannot be 'ring'"),
    ],
)
def test_fields_that_do_not_fit(fields: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _core.Policy(**fields)
    with pytest.raises(error, match=text):
        _core.Policy().replace(**fields)
    with pytest.raises(AttributeError, match="there is no field ranks"):
        _core.Policy().ranks  # noqa: B018
