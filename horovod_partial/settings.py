"""Every environment variable of horovod_partial. An argument comes before its variable, a variable before the default."""

from __future__ import annotations

import difflib
import functools
import math
import os
import warnings
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from horovod_partial import policies

PREFIX = "HOROVOD_PARTIAL_"
# Read by the build, not here: where an offline build finds Horovod's source archive.
BUILD_VARIABLES = {PREFIX + "HOROVOD_SOURCE", PREFIX + "CACHE"}


class Settings(BaseSettings):
    """The settings, each as `HOROVOD_PARTIAL_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore")

    sync: str = Field(default="full", description="Sync policy where the program names none.")
    max_staleness: int = Field(default=16, ge=0, description="Rounds in a row that a rank may miss.")
    grace_ms: float | Literal["auto"] = Field(default="auto", description="How long a satisfied round stays open.")
    missed: Literal["auto", "sum", "replay", "latest"] = Field(default="auto", description="What a late rank gets.")
    bucket_mb: float = Field(
        default=25.0, gt=0, description="Size of the buckets that gradients are packed into, in MB."
    )
    waiting_ms: float = Field(default=5.0, gt=0, description="A wait for a round this long counts as blocked.")
    parked_ms: float = Field(
        default=100.0, gt=0, description="A full collective outstanding this long counts as blocked."
    )
    decision_log: str = Field(
        default="", description="File to which rank 0 records what it saw and decided; empty for none."
    )
    experimental_gpu: bool = Field(
        default=False, description="Accept CUDA tensors, although no run on a GPU has been recorded yet."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="Least severe message shown."
    )

    @field_validator("sync")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        policies.parse(value)
        return value

    @field_validator("grace_ms")
    @classmethod
    def _not_negative(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise ValueError("must be 'auto' or a number of milliseconds, 0 or more")
        return value


@functools.cache
def settings() -> Settings:
    """The settings of this process, read once. Warns about variables of ours that mean nothing."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | BUILD_VARIABLES
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            warnings.warn(f"the environment variable {name} is unknown to horovod_partial{hint}", stacklevel=2)
    return Settings()
