"""What a report is made of: a list of sections, which `render` writes as HTML, Markdown and LaTeX.

Texts may have `code` in backticks. What is empty is false and left out: a text without lines, a
table without rows, a section with nothing in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Text:
    """Sentences, each a paragraph or an item of a list, or one block of code.

    soft: small and grey on the page.
    """

    lines: Sequence[str]
    kind: Literal["paragraphs", "list", "numbered", "code"] = "paragraphs"
    soft: bool = False

    def __bool__(self) -> bool:
        return any(self.lines)


@dataclass(frozen=True)
class Terms:
    """(what, sentence) pairs; those named in `wrong` are marked on the page."""

    pairs: Sequence[tuple[str, str]]
    wrong: Sequence[str] = ()


@dataclass(frozen=True)
class Column:
    """A table's column. Numbers stand right, code has lines, links are for the page alone."""

    name: str
    kind: Literal["words", "number", "code", "links"] = "words"


def words(*names: str) -> list[Column]:
    return [Column(name) for name in names]


def numbers(*names: str) -> list[Column]:
    return [Column(name, "number") for name in names]


@dataclass(frozen=True)
class Badge:
    """A text with a colour of its own (a verdict), and a remark in brackets after it."""

    text: str
    look: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.note})" if self.note else self.text


@dataclass(frozen=True)
class Links:
    """(text, address) pairs; an address is one of the web, or a path from the page on."""

    pairs: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        return ", ".join(text for text, _ in self.pairs)


@dataclass(frozen=True)
class Row:
    """arm: whose it is, for the page's filter."""

    cells: Sequence[str | Badge | Links]
    arm: str = ""

    @property
    def texts(self) -> list[str]:
        return [str(cell) for cell in self.cells]


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows. page_only: Markdown leaves it out."""

    id: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    sortable: bool = True
    page_only: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]


@dataclass(frozen=True)
class Figure:
    """A Vega-Lite specification with its data, title and caption. name: of its files."""

    name: str
    title: str
    caption: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class Fold:
    """What the page shows when it is asked to. page_only: Markdown leaves it out."""

    title: str
    content: Sequence[Text | Terms | Table | Figure]
    page_only: bool = False

    def __bool__(self) -> bool:
        return any(self.content)


Content = Text | Terms | Table | Figure | Fold


@dataclass(frozen=True)
class Section:
    """title: "" for what stands right below the report's own. page_only: Markdown leaves it out.
    folded: the page shows it when it is asked to."""

    title: str
    anchor: str
    content: Sequence[Content]
    page_only: bool = False
    folded: bool = False

    def __bool__(self) -> bool:
        return any(self.content)


@dataclass(frozen=True)
class Document:
    """A whole report. kind: what it is a report of."""

    kind: str
    title: str
    question: str
    sections: Sequence[Section]

    @property
    def figures(self) -> list[Figure]:
        """In the order of the sections, those in folds too."""
        items = [item for section in self.sections for item in section.content]
        flat = [one for i in items for one in (i.content if isinstance(i, Fold) else [i])]
        return [one for one in flat if isinstance(one, Figure)]
