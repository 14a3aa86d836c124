"""Reads the environment variables of horovod_partial. Arguments override variables, and variables override defaults."""

from __future__ import annotations

import difflib
import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from horovod_partial import policies

PREFIX = "HOROVOD_PARTIAL_"
# The build reads these environment variables. They say where an offline build finds Horovod's source archive.
BUILD_VARIABLES = {PREFIX + "HOROVOD_SOURCE", PREFIX + "CACHE"}
OF_EACH_RANK = {"log_level"}  # settings that may differ between ranks; all others must be equal on all ranks


class Settings(BaseSettings):
    """The settings of horovod_partial. Each is read from the environment variable `HOROVOD_PARTIAL_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore")

    sync: str = Field(default="full", description="Sync policy where the program names none.")
    bucket_mb: float = Field(
        default=25.0, gt=0, description="Size of the buckets that gradients are packed into, in MB."
    )
    abort_seconds: float = Field(
        default=0.0, description="End the job when a rank has given no sign of life for so long; 0 for never."
    )
    stall_seconds: float = Field(
        default=60.0,
        description="Write the stacks of ranks that wait, and of those they wait for, within so long; 0 for never.",
    )
    heal: Literal["0", "1", "raise"] = Field(
        default="1",
        description="What a flush does with replicas that have parted: make them equal, leave them (0), or raise an error.",
    )
    record: str = Field(default="", description="Folder in which each rank records what it sees; empty for none.")
    record_mb: float = Field(default=64.0, ge=1, lt=1e6, description="Size of a rank's recording, in MB.")
    watch: bool = Field(
        default=False, description="Log on rank 0 when a rank becomes slow, in what way, and when it is over."
    )
    metrics_port: int = Field(
        default=0, ge=0, le=65535, description="Port at which rank 0 serves metrics for Prometheus; 0 for none."
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address at which rank 0 serves metrics.")
    experimental_gpu: bool = Field(
        default=False, description="Accept TensorFlow's tensors on a GPU, where TensorFlow has not been tried yet."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="Least severe message shown."
    )

    @property
    def watches_steps(self) -> bool:
        """Whether every rank reports to rank 0 how long it computes in each step."""
        return self.watch or self.metrics_port > 0

    @field_validator("sync")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        policies.parse(value)
        return value

    @field_validator("abort_seconds", "stall_seconds")
    @classmethod
    def _never_or_a_while(cls, value: float) -> float:
        if value == 0 or 1 <= value <= 86400:
            return value
        raise ValueError("must be 0, for never, or 1 to 86400 seconds")


@functools.cache
def settings() -> Settings:
    """Return the settings of this process. The environment is read once; unknown `HOROVOD_PARTIAL_*` variables warn.

    Raises ValueError if a variable has a wrong value.
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields} | BUILD_VARIABLES
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            warnings.warn(f"the environment variable {name} is unknown to horovod_partial{hint}", stacklevel=2)
    try:
        return Settings()
    except ValidationError as error:
        wrong = {str(one["loc"][0]): one for one in error.errors()}
        # Prefer "ctx", which has the error of a validator of `Settings` as raised. In "msg" pydantic adds words to it.
        causes = {name: one.get("ctx", {}).get("error", one["msg"]) for name, one in wrong.items()}
        texts = [f"{PREFIX}{name.upper()}={one['input']!r}: {causes[name]}" for name, one in wrong.items()]
        raise ValueError("; ".join(texts)) from None


@functools.cache
def shared() -> dict[str, Any]:
    """Return the settings that this process's environment has set and that must be equal on all ranks.

    Settings that the process takes from rank 0 later are not among them.
    """
    return settings().model_dump(include=settings().model_fields_set - OF_EACH_RANK)


def adopt(by_rank: Sequence[Mapping[str, Any]], rank: int) -> list[str]:
    """Copy those settings from rank 0 that the environment of this rank does not set.

    `by_rank` has the result of `shared` on each rank. Returns the copied variables as texts, such as
    `HOROVOD_PARTIAL_SYNC=solo`. If a rank has set a variable differently from rank 0, every rank raises the same
    ValueError, which names the variable and the ranks.
    """
    first = by_rank[0]
    for name, field in Settings.model_fields.items():
        value = first.get(name, field.default)
        others = [r for r, of_rank in enumerate(by_rank) if of_rank.get(name, value) != value]
        if others:
            there = ", ".join(f"{by_rank[r][name]} on rank {r}" for r in others)
            here = first.get(name, f"not set, that is {value},")
            raise ValueError(
                f"{PREFIX}{name.upper()} is {there}, but {here} on rank 0: set it alike on every rank, or on rank 0 alone"
            )
    for name in Settings.model_fields.keys() - OF_EACH_RANK - by_rank[rank].keys():
        value = first.get(name, Settings.model_fields[name].default)
        if getattr(settings(), name) != value:  # in an elastic job, the value may be that of an earlier rank 0
            setattr(settings(), name, value)
    return [f"{PREFIX}{name.upper()}={value}" for name, value in first.items() if name not in by_rank[rank]]
