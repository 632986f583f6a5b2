"""The figures as files, SVG and PDF, drawn without a browser."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import altair as alt
import vl_convert

from zpp_lab.files import write_atomic
from zpp_lab.study.figures import Figure

SUFFIXES = (".svg", ".pdf")
# Texts are measured here with one font and shown with the reader's, which may be wider.
ROOM = {"left": 24, "right": 48, "top": 8, "bottom": 8}


def write_pictures(folder: Path, figures: Sequence[Figure], known: Sequence[str]) -> list[Path]:
    """Write every figure into `folder`; remove others of `known` that lie there."""
    folder.mkdir(exist_ok=True)
    made = {figure.name for figure in figures}
    for name in set(known) - made:
        for suffix in SUFFIXES:
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
    paths = []
    for figure in figures:
        svg = vl_convert.vegalite_to_svg(
            figure.spec | {"padding": ROOM}, vl_version=vegalite_version()
        )
        write_atomic(folder / f"{figure.name}.svg", svg)
        (folder / f"{figure.name}.pdf").write_bytes(vl_convert.svg_to_pdf(svg))
        paths += [folder / f"{figure.name}{suffix}" for suffix in SUFFIXES]
    return paths


@cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that may stand inside a <script> element."""
    bundle = vl_convert.javascript_bundle(vl_version=vegalite_version())  # type: ignore[call-arg]
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def vegalite_version() -> str:
    """The Vega-Lite that Altair writes for, as vl-convert names it ("6.1")."""
    return ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
