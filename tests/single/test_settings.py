"""Environment variables: names, values, and what comes first."""

import os
import warnings
from collections.abc import Iterator

import pytest

from horovod_partial import settings as module


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of ours is set, and nothing has been read."""
    for name in list(os.environ):
        if name.startswith(module.PREFIX):
            monkeypatch.delenv(name)
    module.settings.cache_clear()
    module.shared.cache_clear()
    yield
    module.settings.cache_clear()
    module.shared.cache_clear()


def test_defaults() -> None:
    settings = module.settings()
    assert (settings.sync, settings.bucket_mb, settings.heal) == ("full", 25.0, "1")


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_PARTIAL_SYNC", "quorum:0.75,max_staleness=3")
    monkeypatch.setenv("HOROVOD_PARTIAL_BUCKET_MB", "2.5")
    settings = module.settings()
    assert (settings.sync, settings.bucket_mb) == ("quorum:0.75,max_staleness=3", 2.5)


def test_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.settings().sync == "full"
    monkeypatch.setenv("HOROVOD_PARTIAL_SYNC", "solo")
    assert module.settings().sync == "full"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("SYNC", "most", "unknown sync policy 'most'; known are"),
        ("SYNC", "", "unknown sync policy ''"),
        ("SYNC", "quorum:x", "invalid sync policy 'quorum:x'"),
        ("SYNC", "solo:max_staleness=-1", "invalid sync policy 'solo:max_staleness=-1': max_staleness must be"),
        ("BUCKET_MB", "many", "Input should be a valid number"),
        ("ABORT_SECONDS", "0.1", "must be 0, for never, or 1 to 86400 seconds"),
        ("ABORT_SECONDS", "inf", "must be 0, for never, or 1 to 86400 seconds"),
        ("STALL_SECONDS", "0.5", "must be 0, for never, or 1 to 86400 seconds"),
        ("BUCKET_MB", "0", "Input should be greater than 0"),
        ("LOG_LEVEL", "loud", "Input should be 'debug', "),
    ],
)
def test_wrong_values(monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str) -> None:
    monkeypatch.setenv("HOROVOD_PARTIAL_" + name, value)
    with pytest.raises(ValueError, match=rf"^HOROVOD_PARTIAL_{name}='{value}': {text}[^\n]*$"):
        module.settings()


def test_a_rank_takes_what_rank_0_has_set() -> None:
    assert module.shared() == {}
    by_rank = [{"sync": "solo", "bucket_mb": 2.0}, {"bucket_mb": 2.0}, {}]
    assert module.adopt(by_rank, 0) == []
    assert module.settings().sync == "full"
    assert module.adopt(by_rank, 1) == ["HOROVOD_PARTIAL_SYNC=solo"]
    assert (module.settings().sync, "sync" in module.settings().model_fields_set) == ("solo", True)
    assert module.adopt([{"bucket_mb": 3.0}, {}], 1) == ["HOROVOD_PARTIAL_BUCKET_MB=3.0"]  # after a restart
    assert (module.settings().sync, module.settings().bucket_mb) == ("full", 3.0)
    assert module.shared() == {}


SEVERAL = [{"sync": "solo"}, {}, {"sync": "full"}, {"sync": "majority"}]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    ("by_rank", "text"),
    [
        (SEVERAL, "SYNC is full on rank 2, majority on rank 3, but solo on rank 0"),
        ([{}, {}, {}, {"heal": "raise"}], "HEAL is raise on rank 3, but not set, that is 1, on rank 0"),
    ],
)
def test_settings_that_contradict(by_rank: list[dict[str, str]], text: str, rank: int) -> None:
    with pytest.raises(ValueError, match=f"^HOROVOD_PARTIAL_{text}: set it alike on every rank, or on rank 0 alone$"):
        module.adopt(by_rank, rank)
    assert module.settings().sync == "full"


def test_what_each_rank_may_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_PARTIAL_BUCKET_MB", "3")
    monkeypatch.setenv("HOROVOD_PARTIAL_LOG_LEVEL", "info")
    assert module.shared() == {"bucket_mb": 3.0}


def test_unknown_variables_get_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_PARTIAL_SYNK", "solo")
    told = "HOROVOD_PARTIAL_SYNK is unknown to horovod_partial; did you mean HOROVOD_PARTIAL_SYNC"
    with pytest.warns(UserWarning, match=told):
        module.settings()


def test_variables_of_the_build_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module.BUILD_VARIABLES:
        monkeypatch.setenv(name, "x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.settings()


def test_every_setting_is_described() -> None:
    assert all(field.description for field in module.Settings.model_fields.values())
