"""Writes dataclasses to JSON files, and reads them back."""

from __future__ import annotations

import json
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kind = TypeVar("Kind")


def save(instance: DataclassInstance, path: str | PathLike[str]) -> None:
    """Write a dataclass to a JSON file."""
    Path(path).write_text(json.dumps(asdict(instance), indent=1) + "\n")


def load(path: str | PathLike[str], what: str) -> Any:
    """Read a JSON file. `what` says in errors what the file should hold. Raises ValueError if it is not JSON."""
    try:
        return json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds no {what}: {error}") from None


def read_as(kind: type[Kind], document: Any, path: str | PathLike[str], what: str) -> Kind:
    """Convert the content of a JSON file to a dataclass. `path` and `what` name the file and its purpose in errors.

    Raises ValueError if a field is missing or has another type, or if the class refuses its value.
    """
    try:
        return TypeAdapter(kind).validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} holds no {what}: {place + ': ' if place else ''}{first['msg']}") from None
