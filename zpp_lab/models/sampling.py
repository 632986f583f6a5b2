"""Draw tokens by the Gumbel-max trick, with noise that is a pure function of what it is for.

The token is the argmax of logits / temperature + g, where g = -log(-log(u)) is drawn for each entry
of the vocabulary (Gumbel 1954; Maddison, Tarlow and Minka 2014, arXiv:1411.0030): a sample of the
softmax. Draws come from Philox4x32-7 (`codecs/noise.py`), so a token depends on no rank, batch,
order of prompts or resume:

    key     = BLAKE2s with a digest of 8 bytes of seed and step, as `noise_key` reads four numbers
    counter = (entry // 4, position in the completion, sample, prompt)     four 32-bit words
    entry v takes the upper 24 bits of word v % 4;  u = (24 bits + 0.5) / 2^24, exact in fp64

Temperature is all there is: top-p and top-k sample another distribution than the one whose
log-probabilities the loss takes.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from zpp_lab.codecs.noise import philox

Key = tuple[int, int]  # seed and step
WORDS = 4  # entries of the vocabulary that one counter serves


def sampling_key(key: Key) -> int:
    """Return the 64-bit Philox key of all tokens that a step samples."""
    data = b"".join(number.to_bytes(8, "little") for number in key)
    return int.from_bytes(hashlib.blake2s(data, digest_size=8).digest(), "little")


def gumbel(
    key: Key, entries: int, position: int | Tensor, samples: Tensor, prompts: Tensor
) -> Tensor:
    """Draw fp64 [B, entries], a row for each sample (int64 [B]) of a prompt (its number, [B]).
    position: in the completion, a number or an int64 tensor [1]."""
    blocks = torch.arange(-(-entries // WORDS), device=samples.device)
    at = position
    if not isinstance(at, Tensor):
        at = torch.full((1,), at, dtype=torch.int64, device=samples.device)
    words = philox((blocks, at, samples[:, None], prompts[:, None]), sampling_key(key))
    bits = torch.stack(words, -1).flatten(1)[:, :entries] >> 8
    return -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-24))


def sample(
    logits: Tensor,
    temperature: float,
    key: Key,
    position: int | Tensor,
    samples: Tensor,
    prompts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row of logits [B, vocab]; returns tokens, int64 [B], and their
    log-probabilities under softmax(logits / temperature), fp32 [B]. With temperature 0 the largest
    logit's token, and its log-probability at temperature 1."""
    scores = logits.float()
    if temperature:
        scores = scores / temperature
        noise = gumbel(key, scores.shape[1], position, samples, prompts)
        tokens = (scores.double() + noise).argmax(1)
    else:
        tokens = scores.argmax(1)
    found = torch.log_softmax(scores, 1).gather(1, tokens[:, None])
    return tokens, found[:, 0]
