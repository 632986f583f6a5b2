import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.fsdp_world import forks
from zpp_lab.config.data import DataConfig
from zpp_lab.data import open_data, prepare
from zpp_lab.data.corpus import FileCorpus
from zpp_lab.data.prepare import open_corpus
from zpp_lab.data.tokenizer import ByteTokenizer


@pytest.fixture
def cfg(tmp_path) -> DataConfig:
    """Forty files of 300 bytes each, every tenth held out."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i:02}.txt").write_bytes(bytes([65 + i]) * 299 + b"\n")
    return DataConfig(
        name="text",
        path=str(text),
        heldout_every=10,
        seq_len=16,
        cache_dir=str(tmp_path / "cache"),
    )


def changed(cfg: DataConfig, **values: object) -> DataConfig:
    return DataConfig(**{**cfg.__dict__, **values})


def folders(cfg: DataConfig) -> list[Path]:
    return [p for p in Path(cfg.cache_dir).iterdir() if p.is_dir()]


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the files whose content was read."""
    seen: list[str] = []
    read = FileCorpus._read

    def spy(self, file):
        seen.append(file.name)
        return read(self, file)

    monkeypatch.setattr(FileCorpus, "_read", spy)
    return seen


def test_documents_end_with_a_marker_and_every_nth_is_held_out(cfg):
    data = open_data(cfg)
    assert (data.files, data.tokens, data.heldout_tokens) == (40, 36 * 301, 4 * 301)
    offsets, stream = data.offsets["heldout"], data.streams["heldout"]
    assert offsets.tolist() == [0, 301, 602, 903, 1204]
    for i, number in enumerate((9, 19, 29, 39)):
        document = bytes(stream[offsets[i] : offsets[i + 1]])
        assert document == bytes([65 + number]) * 299 + b"\n\0"
    assert len(data.offsets["train"]) == 37


def test_of_few_files_the_last_part_of_each_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 900 + "y" * 100)
    (tmp_path / "b.txt").write_text("é" * 500)
    data = open_data(
        DataConfig(
            name="text",
            path=str(tmp_path),
            heldout_every=10,
            cache_dir=str(tmp_path / ".cache"),
        )
    )
    assert bytes(data.streams["heldout"]) == b"y" * 100 + b"\0" + "é".encode() * 50 + b"\0"
    assert data.files == 2


def test_second_call_reads_no_text(cfg, reads):
    first = open_data(cfg)
    assert len(reads) == 40
    second = open_data(cfg)
    assert len(reads) == 40
    assert second.hash == first.hash
    assert np.array_equal(second.streams["train"], first.streams["train"])


def test_changed_text_is_prepared_anew(cfg):
    before = open_data(cfg).hash
    path = Path(cfg.path, "03.txt")
    path.write_bytes(path.read_bytes().replace(b"D", b"d"))
    os.utime(path, ns=(1, 1))
    assert open_data(cfg).hash != before


def test_hash_is_of_content_not_of_place_or_time(cfg, tmp_path):
    before = open_data(cfg).hash
    Path(cfg.path).rename(tmp_path / "moved")
    moved = changed(cfg, path=str(tmp_path / "moved"))
    for path in Path(moved.path).iterdir():
        os.utime(path, ns=(1, 1))
    assert open_data(moved).hash == before
    assert open_data(changed(moved, heldout_every=5)).hash != before
    Path(moved.path, "00.txt").rename(tmp_path / "moved" / "0.txt")
    assert open_data(moved).hash != before


def test_bpe_trains_on_training_text_alone(cfg):
    for i in range(40):
        kind = b"held" if i % 10 == 9 else b"train"
        Path(cfg.path, f"{i:02}.txt").write_bytes(b"%s common words %d\n" % (kind, i) * 20)
    data = open_data(changed(cfg, tokenizer="bpe", vocab_size=270))
    assert data.vocab_size == 270
    assert data.streams["train"].dtype == np.uint16
    vocabulary = json.loads((folders(cfg)[0] / "tokenizer.json").read_text())["model"]["vocab"]
    assert "train" in vocabulary or "rain" in vocabulary
    assert not any("eld" in token for token in vocabulary)


@pytest.mark.parametrize(
    "name", ["train.bin", "heldout.bin", "train.offsets.bin", "heldout.offsets.bin", "meta.json"]
)
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damage_is_recognised_and_repaired(cfg, reads, name, damage):
    whole = open_data(cfg)
    tokens, hash_ = np.array(whole.streams["train"]), whole.hash
    path = folders(cfg)[0] / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-5])
    else:
        content[len(content) // 2] ^= 0x80
        path.write_bytes(content)
    again = open_data(cfg)
    assert len(reads) == 80
    assert again.hash == hash_
    assert np.array_equal(again.streams["train"], tokens)


def test_full_disk_says_so_and_leaves_nothing(cfg):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a disk that fills up
    try:
        with pytest.raises(OSError, match=r"data\.cache_dir"):
            open_data(cfg)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folders(cfg) == []
    assert open_data(cfg).files == 40


def test_unreadable_text_leaves_nothing(cfg):
    Path(cfg.path, "20.txt").write_bytes(b"\0" * 300)
    with pytest.raises(ValueError, match=r"20\.txt"):
        open_data(cfg)
    assert folders(cfg) == []


def prepared(cfg: DataConfig, dies: bool, hashes: Any = None) -> None:
    if dies:
        prepare.sync_folder = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
    found = open_data(cfg).hash
    hashes.put(found)


def test_processes_killed_or_side_by_side(cfg):
    context = forks()
    killed = context.Process(target=prepared, args=(cfg, True))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert [p.name.startswith(".") for p in folders(cfg)] == [True]  # half-written, not in use
    hashes = context.Queue()
    both = [context.Process(target=prepared, args=(cfg, False, hashes)) for _ in range(2)]
    for process in both:
        process.start()
    assert {hashes.get(timeout=120) for _ in both} == {open_data(cfg).hash}
    for process in both:
        process.join()
    assert [p.name.startswith(".") for p in folders(cfg)] == [False]


def test_bpe_learns_from_every_nth_training_document(cfg, monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(
        prepare.BpeTokenizer,
        "train",
        classmethod(lambda cls, texts, size: seen.extend(t[0] - 65 for t in texts) or _Letters()),
    )
    every = changed(cfg, tokenizer="bpe", vocab_size=300, bpe_every=5)
    assert open_data(every).tokens == 36 * 301
    assert seen == [0, 5, 11, 16, 22, 27, 33, 38]  # 9, 19, 29 and 39 are held out
    assert prepare._key(open_corpus(every), every) != prepare._key(
        open_corpus(every), changed(every, bpe_every=1)
    )


class _Letters(ByteTokenizer):
    vocab_size = 300
