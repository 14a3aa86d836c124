"""Environment variables: names, values, and what comes first."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pydantic
import pytest

from horovod_partial import settings as module


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of ours is set, and nothing has been read."""
    import os

    for name in list(os.environ):
        if name.startswith(module.PREFIX):
            monkeypatch.delenv(name)
    module.settings.cache_clear()
    yield
    module.settings.cache_clear()


def test_defaults() -> None:
    settings = module.settings()
    assert (settings.sync, settings.max_staleness, settings.grace_ms, settings.missed) == ("full", 16, "auto", "auto")


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_PARTIAL_SYNC", "quorum:0.75")
    monkeypatch.setenv("HOROVOD_PARTIAL_MAX_STALENESS", "3")
    monkeypatch.setenv("HOROVOD_PARTIAL_GRACE_MS", "2.5")
    settings = module.settings()
    assert (settings.sync, settings.max_staleness, settings.grace_ms) == ("quorum:0.75", 3, 2.5)


def test_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.settings().sync == "full"
    monkeypatch.setenv("HOROVOD_PARTIAL_SYNC", "solo")
    assert module.settings().sync == "full"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SYNC", "most"),
        ("MAX_STALENESS", "-1"),
        ("MAX_STALENESS", "many"),
        ("GRACE_MS", "-2"),
        ("GRACE_MS", "long"),
        ("MISSED", "none"),
        ("BUCKET_MB", "0"),
        ("WAITING_MS", "0"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_wrong_values(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("HOROVOD_PARTIAL_" + name, value)
    with pytest.raises(pydantic.ValidationError, match=rf"(?s){name.lower()}"):
        module.settings()


def test_unknown_variables_get_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_PARTIAL_SYNK", "solo")
    with pytest.warns(
        UserWarning, match="HOROVOD_PARTIAL_SYNK is unknown to horovod_partial; did you mean HOROVOD_PARTIAL_SYNC"
    ):
        module.settings()


def test_variables_of_the_build_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module.BUILD_VARIABLES:
        monkeypatch.setenv(name, "x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.settings()


def test_every_setting_is_described() -> None:
    assert all(field.description for field in module.Settings.model_fields.values())


def test_an_argument_comes_before_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod_partial import policies

    monkeypatch.setenv("HOROVOD_PARTIAL_SYNC", "solo")
    assert policies.resolve("majority", module.settings().sync) == policies.Majority()
    assert policies.resolve(None, module.settings().sync) == policies.Solo()
