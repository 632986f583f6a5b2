"""The texts of the reference study: Python source of packages that constraints.txt pins, and
English prose of the pages in Debian's documentation packages that prose_packages.txt pins.

    corpus.py make python|prose FOLDER    the text's archive: of what is installed, or downloaded
    corpus.py unpack python|prose FOLDER  its files into data_cache, once; of python a quarter too
    corpus.py tokenizer python|prose      a BPE of 4096 of them, from every 8th training file

An archive's text is the same wherever it is made: files by name, each content once, no times. Its
sha256 is pinned beside this file in corpus.sha256, and text with another one is refused: a run on
other text would be no run of these studies.
"""

from __future__ import annotations

import hashlib
import html
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

HERE = Path(__file__).parent
PINNED = HERE / "corpus.sha256"
DEBIAN = HERE / "prose_packages.txt"  # name, version and sha256 of each file
CACHE = Path("data_cache")
PACKAGES = (  # most text first; as long as their files are the same on every platform
    "torch",
    "sympy",
    "pandas",
    "scipy",
    "statsmodels",
    "numpy",
    "networkx",
    "mypy",
    "wandb",
    "altair",
    "huggingface_hub",
    "playwright",
    "narwhals",
    "hypothesis",
    "mpmath",
    "pydantic",
)
WRITTEN_BY_BUILDS = re.compile(r"(version|_version|__config__|_distributor_init\w*)\.py$")
MOST = 300_000  # bytes of a file; longer ones are tables, or a manual's single page
NUMBERS = 0.2  # share of digits above which a file is a table


# Translations, Rust's library, copies of sources: near-copies of other pages, or lists of names.
NO_PROSE = re.compile(r"/(?!en)[a-z]{2,3}[-_][A-Z]{2}/|/rust-doc/html/(std|core|alloc)/|/_sources/")
PAGE = re.compile(r"\.(x?html?|page)(\.en)?$")
CUT = re.compile(  # whole elements, unless they close themselves
    r"<!--.*?-->|<(script|style|head|header|footer|nav|form|select|pre|math|svg)"
    r"(?:\s(?:[^>]*[^/>])?)?>.*?</\1\s*>",
    re.S | re.I,
)
TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)[^>]*>")
PARAGRAPH = {"p", "li", "dd", "title", "h1", "h2", "h3", "h4", "h5", "h6"}
BETWEEN = {"div", "ul", "ol", "dl", "dt", "section", "article", "body", "blockquote", "main", "hr"}
TABLE = {"table", "tr", "td", "th"}
SENTENCE = 60  # characters of text in no paragraph's element: shorter ones are navigation
LETTERS = 0.85  # share of letters and spaces below which a paragraph is code
ENGLISH = set(
    re.findall(
        r"\w+",
        "the of and to a in is for that be as with are it or by on an this from at not if can will "
        "you which when have has was",
    )
)
COMMON = 0.25  # share of those words below which a document is no English prose
LEAST = 2000  # bytes of a document


@dataclass(frozen=True)
class Text:
    archive: str  # without .tar.xz
    folder: Path  # where studies read it
    tokenizer: str
    heldout_every: int  # data.heldout_every of its studies: 2^21 held-out tokens at least
    files: Callable[[], dict[str, bytes]]  # name → content, by name; each content once

    @property
    def pinned(self) -> str | None:
        """sha256 of the archive before it is packed; None before it is made for the first time."""
        lines = PINNED.read_text().splitlines()
        return dict(line.split()[::-1] for line in lines).get(f"{self.archive}.tar")


def main() -> int:
    command, name, *rest = sys.argv[1:]
    texts = {
        "python": Text("corpus", CACHE / "reference_corpus", "tokenizer.json", 20, source),
        "prose": Text("corpus_prose", CACHE / "reference_prose", "tokenizer_prose.json", 16, prose),
    }
    if command == "make":
        return make(texts[name], Path(rest[0]))
    if command == "tokenizer":
        return tokenizer(texts[name])
    code = unpack(texts[name], Path(rest[0]))
    return code or (quarter(texts[name]) if name == "python" else 0)


def make(text: Text, folder: Path) -> int:
    files = text.files()
    whole = archive(files)
    found = hashlib.sha256(whole).hexdigest()
    print(f"{len(files)} files, {sum(map(len, files.values())) / 1e6:.1f} MB, sha256 {found}")
    if text.pinned is None:
        with PINNED.open("a") as pins:
            pins.write(f"{found}  {text.archive}.tar\n")
    elif text.pinned != found:
        print(
            f"{PINNED} has another sha256: make it of the packages that are pinned", file=sys.stderr
        )
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 192 << 20}]
    packed = lzma.compress(whole, lzma.FORMAT_XZ, lzma.CHECK_CRC64, filters=filters)
    target = folder / f"{text.archive}.tar.xz"
    target.write_bytes(packed)
    print(f"{target}: {len(packed) / 1e6:.1f} MB")
    return 0


def source() -> dict[str, bytes]:
    """Python files; one that comes again is kept under the first of its names."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", Path("constraints.txt").read_text(), re.M))
    found: dict[str, bytes] = {}
    for package in PACKAGES:
        try:
            installed = distribution(package)
        except PackageNotFoundError:
            raise SystemExit(f"{package} is not installed: make setup-dev") from None
        if installed.version.partition("+")[0] != pins[package]:
            raise SystemExit(f"{package} {installed.version}: constraints.txt has {pins[package]}")
        for file in installed.files or ():
            if (
                file.suffix == ".py"
                and ".." not in file.parts
                and not WRITTEN_BY_BUILDS.search(str(file))
            ):
                content = Path(str(file.locate())).read_bytes()
                if is_source(content):
                    found[file.as_posix()] = content
    kept, seen = {}, set()
    for name in sorted(found):
        if found[name] not in seen:
            kept[name] = found[name]
            seen.add(found[name])
    return kept


def is_source(content: bytes) -> bool:
    if not 0 < len(content) <= MOST or b"\0" in content:
        return False
    digits = sum(content.count(str(digit).encode()) for digit in range(10))
    return digits <= NUMBERS * len(content)


def prose() -> dict[str, bytes]:
    """Documents of English prose, without the paragraphs that one before has already."""
    documents = {}
    for package, file in debs():
        for name, page in pages(file):
            found = list(dict.fromkeys(paragraphs(page)))
            if is_prose(found):
                documents[f"{package}/{name}.txt"] = found
    kept: dict[str, bytes] = {}
    seen: set[str] = set()
    for name, found in sorted(documents.items()):
        own = [paragraph for paragraph in found if paragraph not in seen]
        if is_prose(own):
            seen.update(own)
            kept[name] = text_of(own)
    return kept


def debs() -> Iterator[tuple[str, Path]]:
    """Names and files of the pinned packages, downloaded once. SystemExit for any other file."""
    folder = CACHE / "debian"
    folder.mkdir(parents=True, exist_ok=True)
    pins = [line.split() for line in DEBIAN.read_text().splitlines()]
    files = {name: folder / f"{name}_{v.replace(':', '%3a')}_all.deb" for name, v, _ in pins}
    absent = [f"{name}={version}" for name, version, _ in pins if not files[name].is_file()]
    if absent:
        subprocess.run(["apt-get", "--quiet", "download", *absent], cwd=folder, check=False)
    for name, version, digest in pins:
        file = files[name]
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise SystemExit(
                f"{name} {version} of {DEBIAN} is not what apt has: take that version from "
                f"snapshot.debian.org and put it at {file}"
            )
        yield name, file


def pages(deb: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of a package's HTML pages and pages of GNOME's help."""
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as packed,
        tarfile.open(fileobj=packed.stdout, mode="r|") as tar,
    ):
        for entry in tar:
            stream = tar.extractfile(entry) if entry.isreg() else None
            if stream and PAGE.search(entry.name) and not NO_PROSE.search(entry.name):
                content = stream.read()
                try:
                    page = content.decode()
                except UnicodeDecodeError:
                    page = content.decode("latin-1")
                yield entry.name.removeprefix("./usr/share/"), page
    if packed.returncode:
        raise SystemExit(f"{deb} is no whole package")


def paragraphs(page: str) -> list[str]:
    """A page's paragraphs, list items and headings, and sentences between them; no code, no table,
    nothing that is mostly links. By tags alone: Python's own parser changes from version to
    version, and takes three times as long."""
    found: list[str] = []
    own: list[str] = []
    page = CUT.sub(" ", page)
    start = linked = tables = 0
    inside = link = False
    for tag in TAG.finditer(page):
        if not tables:
            own.append(page[start : tag.start()])
            linked += link * len(own[-1])
        start, name, closes = tag.end(), tag[2].lower(), bool(tag[1])
        if name in PARAGRAPH or name in BETWEEN or name in TABLE:
            text = " ".join(html.unescape("".join(own)).replace("¶", "").replace("\0", "").split())
            words = len(text) - len(re.findall(r"[^\w\s]|[\d_]", text))
            if (
                words >= LETTERS * len(text) > 0
                and 2 * linked <= len(text)
                and (inside or len(text) >= SENTENCE)
            ):
                found.append(text)
            own, linked, inside = [], 0, name in PARAGRAPH and not closes
            if name == "table":
                tables = max(0, tables + (-1 if closes else 1))
        elif name == "a":
            link = "href" in tag[0]
        elif name == "br":
            own.append(" ")
    return found


def is_prose(found: list[str]) -> bool:
    words = " ".join(found).lower().split()
    common = sum(word in ENGLISH for word in words)
    return LEAST <= len(text_of(found)) <= MOST and common >= COMMON * len(words)


def text_of(found: list[str]) -> bytes:
    return "".join(f"{paragraph}\n\n" for paragraph in found).encode()


def archive(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(content), 0, 0o644
            tar.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def unpack(text: Text, folder: Path) -> int:
    file, to = folder / f"{text.archive}.tar.xz", text.folder
    mark = to.parent / f"{to.name}.sha256"
    if to.is_dir() and mark.is_file() and mark.read_text() == text.pinned:
        return 0
    whole = lzma.decompress(file.read_bytes())
    found = hashlib.sha256(whole).hexdigest()
    if found != text.pinned:
        print(f"{file} is another corpus: {found}, {PINNED} has {text.pinned}", file=sys.stderr)
        return 1
    work = to.parent / f".{to.name}.{os.getpid()}"
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        tar.extractall(work, filter="data")
    shutil.rmtree(to, ignore_errors=True)
    work.rename(to)
    mark.write_text(found)
    return 0


def quarter(text: Text) -> int:
    """Copy into FOLDER_quarter five of each 19 training files, and the held-out files, which stay
    held out with data.heldout_every=6."""
    from zpp_lab.config.data import DataConfig
    from zpp_lab.data.prepare import open_corpus

    assert text.heldout_every == 20
    to = text.folder.with_name(f"{text.folder.name}_quarter")
    if to.is_dir():
        return 0
    documents = open_corpus(DataConfig("text", path=str(text.folder))).documents()
    names = [name for name, _ in documents]
    work = to.parent / f".{to.name}.{os.getpid()}"
    for index, name in enumerate(names[: len(names) // 20 * 20]):
        if index % 20 in (0, 4, 8, 12, 16, 19):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(text.folder / name, work / name)
    work.rename(to)
    return 0


def tokenizer(text: Text) -> int:
    from zpp_lab.config.data import DataConfig
    from zpp_lab.data.prepare import open_corpus, parts
    from zpp_lab.data.tokenizer import BpeTokenizer

    cfg = DataConfig("text", path=str(text.folder), heldout_every=text.heldout_every)
    texts = [content for _, split, content in parts(open_corpus(cfg), cfg) if split == "train"]
    (HERE / text.tokenizer).write_text(BpeTokenizer.train(texts[::8], 4096).dumps())
    return 0


if __name__ == "__main__":
    sys.exit(main())
