"""Generate completions with a key-value cache, a token of every row a pass.

Prompts are padded on their right, and each row has a length of its own. Shapes stay fixed: a row
that has ended goes on with tokens that do not count, so engines run the same products whatever
other ranks do, and nothing is moved together. Cached passes and a training forward are not equal to
the bit, as products of few rows add in another order than those of many.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zpp_lab.models.sampling import Key, sample

Policy = Callable[..., Tensor]  # (tokens, cache=cache) → logits [B, vocab] of `cache.last`


@dataclass(frozen=True)
class Completions:
    """Prompts with what was generated after them, on the prompts' device.

    tokens: int64 [B, P + N], a row's completion directly behind its prompt, then the end token.
    lengths: int64 [B], of prompt and completion, whose end token counts. logprobs: fp32 [B, N], of
    the sampled tokens as the rollout's weights gave them; 0 where `mask`, bool [B, N], is False.
    """

    tokens: Tensor
    lengths: Tensor
    logprobs: Tensor
    mask: Tensor


class Cache:
    """Keys and values of B rows of up to `slots` tokens; a token's slot is its position.

    positions: int64 [B, T], of the tokens of the present pass. last: int64 [B], the place among
    these T whose logits are wanted. past: what a model of Hugging Face's keeps in place of
    `layers`.
    """

    def __init__(self, slots: int) -> None:
        self.slots, self.passes = slots, 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.past: Any = None
        self.seen: Tensor | None = None  # bool [B, tokens in `past`]: which are no padding

    def enter(self, positions: Tensor, last: Tensor, real: Tensor) -> None:
        """Begin a pass over tokens at `positions`; real: bool [B, T], the tokens that count."""
        self.positions, self.last = positions, last
        self.seen = real if self.seen is None else torch.cat((self.seen, real), 1)
        self.passes += 1
        slots = torch.arange(self.slots, device=positions.device)
        self.mask = (
            slots <= positions[:, None, :, None]
        )  # a slot behind is written before it counts

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values of this pass, [B, T, heads, dim] each; returns those of
        all slots, [B, heads, slots, dim]."""
        if layer not in self.layers:
            batch, _, heads, _ = keys.shape
            made = [t.new_zeros(batch, self.slots, heads, t.shape[-1]) for t in (keys, values)]
            self.layers[layer] = made[0], made[1]
        rows = torch.arange(len(keys), device=keys.device)[:, None]
        stored = self.layers[layer]
        for into, new in zip(stored, (keys, values), strict=True):
            into[rows, self.positions] = new
        return stored[0].transpose(1, 2), stored[1].transpose(1, 2)

    def wanted(self, x: Tensor) -> Tensor:
        """Return of x [B, T, ...] each row's entry that is wanted, [B, 1, ...]."""
        return x[torch.arange(len(x), device=x.device), self.last][:, None]


@torch.no_grad()
def generate(
    model: Policy,
    prompts: Tensor,
    lengths: Tensor,
    ids: Tensor,
    samples: Tensor,
    key: Key,
    max_new: int,
    temperature: float,
    end: int,
    all_done: Callable[[bool], bool],
) -> Completions:
    """Sample a completion of each row, up to `max_new` tokens or the token `end`.

    prompts: int64 [B, P], right-padded; lengths: int64 [B]. ids: each row's prompt number, and
    samples: which of its completions the row is, int64 [B]; both key the draws, with `key`, (seed,
    step). temperature: 0 takes the likeliest token. all_done: told whether every row here has
    ended, says whether those of all ranks have; called before each pass but the first.
    """
    batch, width = prompts.shape
    _check(lengths, width, max_new, temperature)
    tokens = torch.cat((prompts, prompts.new_full((batch, max_new), end)), 1)
    at, lengths = torch.arange(width, device=prompts.device), lengths.clone()
    behind = at >= lengths[:, None]
    tokens[:, :width].masked_fill_(behind, end)
    logprobs = torch.zeros(batch, max_new, device=prompts.device)
    mask = torch.zeros(batch, max_new, dtype=torch.bool, device=prompts.device)
    live, rows = torch.ones_like(mask[:, 0]), torch.arange(batch, device=prompts.device)
    cache = Cache(width + max_new)
    cache.enter(at.expand(batch, -1), lengths - 1, ~behind)
    logits = model(tokens[:, :width], cache=cache)
    for position in range(max_new):
        drawn, found = sample(logits, temperature, key, position, samples, ids)
        drawn = torch.where(live, drawn, end)
        tokens[rows, torch.where(live, lengths, -1)] = torch.where(live, drawn, tokens[:, -1])
        logprobs[:, position], mask[:, position] = torch.where(live, found, 0.0), live
        at = lengths.clamp(max=cache.slots - 1)
        lengths, was = lengths + live, live
        live = live & (drawn != end)
        if position == max_new - 1 or all_done(not bool(live.any())):
            break
        cache.enter(at[:, None], torch.zeros_like(at), was[:, None])
        logits = model(drawn[:, None], cache=cache)
    return Completions(tokens, lengths, logprobs, mask)


def _check(lengths: Tensor, width: int, max_new: int, temperature: float) -> None:
    shortest, longest = int(lengths.min()), int(lengths.max())
    if not 1 <= shortest <= longest <= width:
        raise ValueError(
            f"lengths of prompts are {shortest} to {longest}: use 1 to {width}, the prompts' width"
        )
    if max_new < 1 or temperature < 0:
        raise ValueError(
            f"max_new={max_new}, temperature={temperature}: use max_new=1 or more and a "
            "temperature of 0 or more"
        )


def check_cached(settings: Any, slots: int, longest: int) -> None:
    """ValueError where rows of `slots` tokens are too long for the model's positions, or where a
    window of attention would count the padding between a prompt and its completion."""
    window = getattr(settings.get_text_config(), "sliding_window", None)
    window = window if getattr(settings.get_text_config(), "use_sliding_window", True) else None
    for most, what in ((longest, "positions"), (window, "tokens of its attention's window")):
        if most and slots > most:
            raise ValueError(
                f"a prompt and its completion of {slots} tokens are longer than the {most} {what} "
                f"of {settings.model_type}: use shorter prompts, or fewer new tokens"
            )


def cached_logits(model: Any, forward: Callable[..., Any], tokens: Tensor, cache: Cache) -> Tensor:
    """Run a pass with the model's own cache, in which a row's completion lies behind its prompt's
    padding; returns logits [batch, vocab]. ValueError for a model without such a cache."""
    if "position_ids" not in inspect.signature(forward).parameters:
        raise ValueError(
            f"{type(model).__name__} takes no positions of tokens, which generation from padded "
            "prompts needs: use another model, such as Llama or GPT-2"
        )
    head = model.get_output_embeddings()
    whole = head.forward
    head.forward = lambda x: whole(cache.wanted(x))  # logits of prompts would take gigabytes
    try:
        found = forward(
            input_ids=tokens,
            attention_mask=cache.seen.long() if cache.seen is not None else None,
            position_ids=cache.positions,
            past_key_values=cache.past,
            use_cache=True,
        )
    finally:
        del head.forward
    cache.past = found.past_key_values
    if not hasattr(cache.past, "get_seq_length") or not int(cache.past.get_seq_length()):
        raise ValueError(f"{type(model).__name__} has no key-value cache: use another model")
    logits: Tensor = found.logits[:, -1]
    return logits
