"""One list of sections as a page, as Markdown and as LaTeX."""

from __future__ import annotations

from zpp_lab.study.report.render import markdown
from zpp_lab.study.report.sections import (
    Badge,
    Column,
    Document,
    Fold,
    Row,
    Section,
    Table,
    Terms,
    Text,
    numbers,
    words,
)

COLUMNS = [*words("Arm", "Verdict"), *numbers("Gap_x"), Column("Command", "code")]
ARMS = Table(
    "arms", "All arms", COLUMNS, [Row(["a<b", Badge("worse", "worse", "2|3"), "−1", "x\ny"])]
)
EMPTY = Table("none", "No rows", words("Arm"), [])
DOCUMENT = Document(
    "kind",
    "Title",
    "Why?",
    [
        Section("", "first", [Terms([("Rule", "run `it`"), ("Control", "held")], ["Control"])]),
        Section("Shown", "shown", [ARMS, EMPTY, Fold("More", [Text(["kept"])])]),
        Section("Nothing", "nothing", [EMPTY, Text([])]),
        Section("Lists", "lists", [Text(["one", "two"], "numbered"), Text(["c: 1"], "code")]),
        Section("Runs", "runs", [Text(["only here"])], page_only=True),
    ],
)


def test_markdown() -> None:
    assert markdown(DOCUMENT).split("\n\n") == [
        "# Title",
        "**Why?**",
        "- **Rule**: run `it`\n- **Control**: held",
        "## Shown",
        "*All arms*",
        "| Arm | Verdict | Gap_x | Command |\n| --- | --- | --- | --- |\n"
        "| a<b | worse (2\\|3) | −1 | `x`<br>`y` |",
        "kept",
        "## Lists",
        "1. one\n2. two",
        "```\nc: 1\n```\n",
    ]
