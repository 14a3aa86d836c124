"""Files that another process reads while they are written."""

from __future__ import annotations

from pathlib import Path


def replace(file: Path, text: str) -> None:
    """Give a file a new text. A reader, also after an interrupt, finds the old text or the new one, each whole."""
    draft = file.with_name(f"{file.name}.draft")
    draft.write_text(text)
    draft.replace(file)
