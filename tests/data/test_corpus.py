import os
import sys
import types
from pathlib import Path

import pytest

from zpp_lab.config.data import DataConfig
from zpp_lab.data.corpus import HubCorpus, installation_corpus, stdlib_corpus, text_corpus
from zpp_lab.data.prepare import open_corpus


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_stdlib_is_source_without_tests():
    corpus = stdlib_corpus()
    names = [f.name for f in corpus.files]
    assert names == sorted(names)
    assert {"argparse.py", "asyncio/tasks.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "__pycache__"}
    assert dict(corpus.documents())["argparse.py"].startswith(b"# Author")


def test_stdlib_missing_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="data=text"):
        stdlib_corpus()


def installed(tmp_path, monkeypatch):
    fill(tmp_path / "lib", {"abc.py": b"lib", "test/t.py": b"no", "site-packages/x/y.py": b"no"})
    fill(tmp_path / "lib/site-packages", {"x/y.py": b"pack", "x/bin.py": b"a\0b", "x/z.so": b"so"})
    paths = {"stdlib": str(tmp_path / "lib"), "purelib": str(tmp_path / "lib/site-packages")}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    torch_at(tmp_path / "lib/site-packages", monkeypatch)


def torch_at(packages, monkeypatch):
    """torch is installed in the folder `packages`."""
    found = types.SimpleNamespace(origin=str(packages / "torch" / "__init__.py"))
    monkeypatch.setattr("zpp_lab.data.corpus.find_spec", {"torch": found}.get)


def test_installation_is_all_python_source(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch)
    more = fill(tmp_path / "mine", {"own.py": b"own", "notes.txt": b"no"})
    found = list(installation_corpus(more).documents())
    assert found == [
        ("stdlib/abc.py", b"lib"),
        ("packages/x/y.py", b"pack"),
        ("extra/own.py", b"own"),
    ]


def test_installation_takes_other_files_when_asked(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch)
    more = fill(tmp_path / "mine", {"own.py": b"own", "own.h": b"#pragma once"})
    corpus = open_corpus(DataConfig(name="installation", path=str(more), suffixes=[".h"]))
    assert list(corpus.documents()) == [("extra/own.h", b"#pragma once")]
    with pytest.raises(ValueError, match=r"data\.suffixes=\[\.zig\]"):
        installation_corpus(None, suffixes=(".zig",))


def test_folder_in_order_without_hidden_and_empty_files(tmp_path):
    files = {"b.txt": b"two", "a/z.md": b"one", "empty.txt": b"", ".x": b"no", ".git/c": b"no"}
    corpus = text_corpus(fill(tmp_path, files))
    assert list(corpus.documents()) == [("a/z.md", b"one"), ("b.txt", b"two")]
    assert corpus.count == 2


def test_max_bytes_takes_the_first_bytes(tmp_path):
    fill(tmp_path, {"a": b"123", "b": b"456", "c": b"789"})
    assert [text for _, text in text_corpus(tmp_path, 5).documents()] == [b"123", b"45"]
    assert [text for _, text in text_corpus(tmp_path, 3).documents()] == [b"123"]


@pytest.mark.parametrize("content", [b"\x89PNG\0\1", "text".encode("utf-16")])
def test_what_is_no_text_is_named(tmp_path, content):
    corpus = text_corpus(fill(tmp_path, {"x.bin": content}))
    with pytest.raises(ValueError, match=r"x\.bin.*UTF-8"):
        list(corpus.documents())


def test_pipes_are_passed_over(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    assert text_corpus(fill(tmp_path, {"a": b"x"})).count == 1


def test_file_that_vanishes_or_shrinks_while_it_is_read(tmp_path):
    corpus = text_corpus(fill(tmp_path, {"a.txt": b"long text"}))
    (tmp_path / "a.txt").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"a\.txt"):
        list(corpus.documents())
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ValueError, match=r"a\.txt"):
        list(corpus.documents())


class TestHub:
    ROWS = ({"text": "first", "id": 1}, {"text": "", "id": 2}, {"text": "thi\0rd", "id": 3})

    def corpus(self, monkeypatch, rows=ROWS, **changes) -> HubCorpus:
        calls = []

        def load_dataset(path, subset, *, split, streaming):
            calls.append((path, subset, split, streaming))
            return iter(rows)

        fake = types.SimpleNamespace(load_dataset=load_dataset, calls=calls)
        monkeypatch.setitem(sys.modules, "datasets", fake)
        monkeypatch.setattr("zpp_lab.files.reachable", lambda: True)
        corpus = open_corpus(DataConfig(name="hf", path="some/set", subset="en", **changes))
        assert isinstance(corpus, HubCorpus)
        return corpus

    def test_rows_are_documents(self, monkeypatch):
        corpus = self.corpus(monkeypatch)
        assert list(corpus.documents()) == [("row 0", b"first"), ("row 2", b"third")]
        assert sys.modules["datasets"].calls == [("some/set", "en", "train", True)]

    def test_max_bytes_stops_reading(self, monkeypatch):
        def rows():
            yield {"text": "12345"}
            yield {"text": "67890"}
            raise AssertionError("read on")

        corpus = self.corpus(monkeypatch, rows(), max_bytes=7)
        assert [text for _, text in corpus.documents()] == [b"12345", b"67"]

    def test_column_without_text(self, monkeypatch):
        corpus = self.corpus(monkeypatch, column="id")
        with pytest.raises(ValueError, match=r"data\.column=id .*\btext\b"):
            list(corpus.documents())

    def test_network_failure_while_streaming(self, monkeypatch):
        def rows():
            yield {"text": "12345"}
            raise ConnectionError("connection reset")

        corpus = self.corpus(monkeypatch, rows())
        with pytest.raises(ValueError, match=r"data\.path=some/set .*: connection reset"):
            list(corpus.documents())

    def test_without_a_network_the_answer_is_quick(self, monkeypatch):
        corpus = self.corpus(monkeypatch)
        monkeypatch.setattr("zpp_lab.files.reachable", lambda: False)
        with pytest.raises(ValueError, match=r"data\.path=some/set: .*hf download some/set"):
            list(corpus.documents())
        assert not sys.modules["datasets"].calls

    def test_without_the_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        corpus = open_corpus(DataConfig(name="hf", path="some/set"))
        with pytest.raises(ValueError, match=r"pip install 'zpp_lab\[hf\]'"):
            list(corpus.documents())

    def test_the_package_itself_reads_a_folder(self, tmp_path):
        fill(tmp_path, {"train.jsonl": b'{"text": "first"}\n{"text": "second"}\n'})
        corpus = open_corpus(DataConfig(name="hf", path=str(tmp_path)))
        assert list(corpus.documents()) == [("row 0", b"first"), ("row 1", b"second")]
        corpus = open_corpus(DataConfig(name="hf", path=str(tmp_path), split="nothing"))
        with pytest.raises(ValueError, match=r"data\.split=nothing"):
            list(corpus.documents())
