"""One list of sections as a page, as Markdown and as LaTeX."""

from __future__ import annotations

from zpp_lab.study.report.render import html, latex, markdown
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


def test_the_page_has_all_of_it_but_what_is_empty() -> None:
    page = html(DOCUMENT)
    for text in ("run <code>it</code>", '<dd class="wrong">held', '<th scope="row">a&lt;b</th>'):
        assert text in page
    assert '<span class="look look-worse">worse</span> <span class="needs">(2|3)</span>' in page
    assert '<td class="number">−1</td>' in page
    assert "only here" in page
    assert "Nothing" not in page
    assert "No rows" not in page


def test_latex() -> None:
    lines = latex(ARMS, "50% & more", "mine").splitlines()
    assert "\\caption{50\\% \\& more}" in lines
    assert "\\begin{tabular}{llrl}" in lines
    assert lines[6] == "Arm & Verdict & Gap\\_x & Command \\\\"
    assert lines[8] == "a$<$b & worse (2$|$3) & $-$1 & x"
