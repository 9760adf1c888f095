"""Fenced code blocks of the documentation."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support.source_tree import ROOT

_FENCE = re.compile(
    r"^(?P<marker><!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block and where it stands."""

    where: str
    language: str
    text: str
    not_run: str | None
    """Why the block is not run, from the comment `<!-- not run: why -->` on the line before it."""


def list_pages() -> list[Path]:
    """README and everything under docs."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def list_blocks(page: Path) -> list[Block]:
    """Every fenced block of `page`."""
    text = page.read_text()
    return [
        Block(
            f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}",
            found["language"],
            found["text"],
            found["reason"],
        )
        for found in _FENCE.finditer(text)
    ]


def list_blocks_of(language: str) -> list[Block]:
    """Every block of the documentation in `language`."""
    return [block for page in list_pages() for block in list_blocks(page) if block.language == language]
