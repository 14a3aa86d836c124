"""The fenced blocks of the documents, and the comment before each that says how it is tested.

    <!-- run -->            it is whole, and runs
    <!-- run: torch -->     it runs behind `documents/torch.py`; or beside it, as `train.py`, if it is a block for the shell
    <!-- check: why -->     it is checked without being run: Python compiles, commands and files exist, options are known

What a program prints has the language `text`, and needs no comment. Directives of Sphinx are tested by `make docs`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[3]
PREAMBLES = ROOT / "tests" / "parallel" / "documents"

_RULE = re.compile(r"<!-- (run|check)(?:: (.+))? -->\s*")
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_DIRECTIVE = re.compile(r"\{(?!code)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        file: its document, from the root on.
        line: where its text begins there.
        rule: `run`, `check`, or nothing if no comment says.
        detail: the name of its preamble, or why it is not run.
    """

    file: str
    line: int
    language: str
    text: str
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def preamble(self) -> Path | None:
        """The program that makes it whole."""
        return PREAMBLES / f"{self.detail}.py" if self.rule == "run" and self.detail else None


def blocks() -> list[Block]:
    """All blocks that are neither output nor directives."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [block for page in pages for block in blocks_of(page.read_text(), str(page.relative_to(ROOT)))]


def blocks_of(text: str, file: str) -> Iterator[Block]:
    """The blocks of one document."""
    tokens = MarkdownIt().parse(text)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type != "fence" or token.info == "text" or _DIRECTIVE.match(token.info):
            continue
        comment = _RULE.fullmatch(before.content) if before and before.type == "html_block" else None
        rule, detail = comment.groups("") if comment else ("", "")
        yield Block(file, token.map[0] + 2, token.info, token.content, rule, detail)


def links(text: str) -> list[tuple[str, str]]:
    """The files of the repository, and the anchors in them, that a document links to."""
    return _LINK.findall(text)


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings."""
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in _HEADING.findall(text)}
