"""The repository's own pages as a site: they stay where they are, and so do their links.

Pages come in beside docs/. What they link to and is no page, as pictures and settings, is copied;
a link to a folder leads to its README.md, and to one without becomes plain text. Markdown inside
folds is rendered.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", "GUIDE.md", "ARCHITECTURE.md", "CHANGELOG.md")
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#:]+)((?:#[^)]*)?)\)")


def pages() -> list[Path]:
    """The repository's pages, from its root."""
    found = [ROOT / name for name in NAMES]
    found += sorted(ROOT.glob("experiments/**/*.md"))
    return [path.relative_to(ROOT) for path in found]


def on_files(files: Files, config: Any) -> Files:
    known = {Path(file.src_uri) for file in files}
    wanted = [*pages(), *known]
    for page in [*pages(), *(Path(f.src_uri) for f in files.documentation_pages())]:
        place = page if page in pages() else Path("docs") / page
        for target in _targets(place, (ROOT / place).read_text(encoding="utf-8")):
            if target.is_file() and target.suffix != ".md":
                wanted.append(target.relative_to(ROOT))
    for path in dict.fromkeys(wanted):
        if path not in known:
            uri = path.as_posix()
            files.append(File(uri, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are to be read in the site."""
    own = Path(page.file.src_uri)
    here = ROOT / (own if own in pages() else Path("docs") / own)

    def lead(match: re.Match[str]) -> str:
        text, to, part = match.groups()
        target = (here.parent / to).resolve()
        if target.is_dir() and not (target / "README.md").is_file():
            return text
        if target.is_dir():
            to = f"{to.rstrip('/')}/README.md"
        if here.parent == ROOT / "docs":  # which is the site's root
            to = to.removeprefix("../")
        return f"[{text}]({to}{part})"

    folded = markdown.replace("<details>", '<details markdown="1">')
    return _LINK.sub(lead, folded)


def _targets(page: Path, text: str) -> list[Path]:
    return [(ROOT / page.parent / m[2]).resolve() for m in _LINK.finditer(text)]
