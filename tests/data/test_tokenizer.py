import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpp_lab.data import tokenizer
from zpp_lab.data.tokenizer import BpeTokenizer, ByteTokenizer

TEXT = b"".join(
    b"the %d quick brown foxes jump over the lazy dog number %d\n" % (i, i * i) for i in range(200)
)


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return BpeTokenizer.train([TEXT], 300)


def decode(bpe: BpeTokenizer, tokens: np.ndarray) -> str:
    """Byte-level BPE spells a byte as one printable character; undo that."""
    import tokenizers

    pieces = [bpe.model.id_to_token(int(t)) for t in tokens]
    return tokenizers.decoders.ByteLevel().decode(pieces)


@given(text=st.text(max_size=60))
def test_bpe_loses_nothing(bpe, text):
    tokens = bpe.encode(text.encode(errors="replace"))
    assert decode(bpe, tokens) == text.encode(errors="replace").decode()
    assert bpe.end not in tokens


def test_tokens_of_a_padded_vocabulary_are_replaced(bpe):
    for known in (bpe, ByteTokenizer()):
        tokens = [*known.encode(b"fox").tolist(), known.vocab_size + 3]
        assert known.decode(tokens) == "fox\ufffd"


def test_training_repeats_and_survives_a_round_trip(bpe):
    assert BpeTokenizer.train([TEXT], 300).dumps() == bpe.dumps()
    again = BpeTokenizer(bpe.dumps())
    assert np.array_equal(again.encode(TEXT), bpe.encode(TEXT))


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'zpp_lab\[hf\]'"):
        BpeTokenizer.train([TEXT], 300)


@given(text=st.text(alphabet="ab\né€😀", max_size=200), size=st.integers(4, 40))
def test_pieces_join_to_the_text_and_break_no_character(text, size):
    whole, small = tokenizer._CHUNK, size
    try:
        tokenizer._CHUNK = small
        pieces = list(tokenizer.chunks(text.encode()))
    finally:
        tokenizer._CHUNK = whole
    assert "".join(pieces) == text
    assert all(0 < len(p.encode()) <= small + 3 for p in pieces)
