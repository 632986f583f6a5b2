"""Generate completions with a key-value cache, a token of every row a pass.

Prompts are padded on their right, and each row has a length of its own. Shapes stay fixed: a row
that has ended goes on with tokens that do not count, so engines run the same products whatever
other ranks do, and nothing is moved together. Cached passes and a training forward are not equal to
the bit, as products of few rows add in another order than those of many.

On a GPU the host takes longer to start a pass's small kernels than they run. So `Graphs` capture a
pass, and the draw behind it, in a CUDA graph: the same kernels, hence the same bits.
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
WARM_UP = 2  # passes before a capture: kernels are loaded, tables are made
PAYS = 4  # passes that make up for a capture, which takes the host as long as one


def is_captured(max_new: int) -> bool:
    """Return whether completions are long enough for a capture."""
    return max_new - WARM_UP >= PAYS


@dataclass(frozen=True)
class Completions:
    """Prompts with what was generated after them, on the prompts' device.

    tokens: int64 [B, P + N], a row's completion directly behind its prompt, then the end token.
    lengths: int64 [B], of prompt and completion, whose end token counts. logprobs: fp32 [B, N], of
    the sampled tokens as the rollout's weights gave them; 0 behind a completion's end.
    """

    tokens: Tensor
    lengths: Tensor
    logprobs: Tensor


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


class Graphs:
    """Captures work in CUDA graphs, one after another in one pool of memory: only the last one
    captured may be replayed."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.last: Any = None  # a pool lasts as long as one of its graphs

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return what runs `run` once more, on the current stream. ValueError names the fix where
        it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        failed: BaseException | None = None
        with torch.cuda.stream(self.stream):
            try:
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException as error:
                    failed = error
                graph.capture_end()
            except RuntimeError as error:  # mostly because of the first one
                failed = failed or error
        if isinstance(failed, RuntimeError) and not isinstance(failed, torch.OutOfMemoryError):
            raise ValueError(
                f"a pass of generation cannot be captured in a CUDA graph ({failed}): set "
                "engine.graph=false"
            ) from failed
        if failed is not None:
            raise failed
        self.last = graph
        return graph.replay


class _Rows:
    """Prompts and what is generated behind them. All of it stays where it is, as captured passes
    read and write it."""

    def __init__(
        self, prompts: Tensor, lengths: Tensor, ids: Tensor, samples: Tensor, max_new: int, end: int
    ) -> None:
        (batch, width), device = prompts.shape, prompts.device
        self.ids, self.samples, self.end, self.last = ids, samples, end, width + max_new - 1
        self.tokens = torch.cat((prompts, prompts.new_full((batch, max_new), end)), 1)
        self.lengths = lengths.clone()
        self.logprobs = torch.zeros(batch, max_new, device=device)
        self.rows = torch.arange(batch, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # in the completion
        self.live = torch.ones(batch, dtype=torch.bool, device=device)
        # what the next pass reads: the tokens drawn last, their places, and which of them count
        self.drawn, self.at, self.was = lengths.clone(), lengths.clone(), self.live.clone()

    def draw(self, logits: Tensor, temperature: float, key: Key) -> None:
        """Draw a token of each row from logits [B, vocab]."""
        drawn, found = sample(logits, temperature, key, self.position, self.samples, self.ids)
        self.drawn.copy_(torch.where(self.live, drawn, self.end))
        places = torch.where(self.live, self.lengths, -1)
        self.tokens[self.rows, places] = torch.where(self.live, self.drawn, self.tokens[:, -1])
        self.logprobs.index_copy_(1, self.position, torch.where(self.live, found, 0.0)[:, None])
        self.at.copy_(self.lengths.clamp(max=self.last))
        self.was.copy_(self.live)
        self.lengths += self.live
        self.live &= self.drawn != self.end
        self.position += 1


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
    graphs: Graphs | None = None,
) -> Completions:
    """Sample a completion of each row, up to `max_new` tokens or the token `end`.

    prompts: int64 [B, P], right-padded; lengths: int64 [B]. ids: each row's prompt number, and
    samples: which of its completions the row is, int64 [B]; both key the draws, with `key`, (seed,
    step). temperature: 0 takes the likeliest token. all_done: told whether every row here has
    ended, says whether those of all ranks have; called before each pass but the first. graphs: what
    captures passes of the built-in model, which then calls `model` for the first three alone.
    """
    width = prompts.shape[1]
    _check(lengths, width, max_new, temperature)
    at = torch.arange(width, device=prompts.device)
    real = at < lengths[:, None]
    rows = _Rows(torch.where(real, prompts, end), lengths, ids, samples, max_new, end)
    cache = Cache(width + max_new)
    cache.enter(at.expand(len(prompts), -1), lengths - 1, real)
    rows.draw(model(rows.tokens[:, :width], cache=cache), temperature, key)
    none = torch.zeros_like(lengths)

    def go_on() -> None:
        cache.enter(rows.at[:, None], none, rows.was[:, None])
        rows.draw(model(rows.drawn[:, None], cache=cache), temperature, key)

    run = go_on
    for number in range(1, max_new):
        if all_done(not bool(rows.live.any())):
            break
        if number == WARM_UP and graphs is not None and is_captured(max_new):
            run = graphs.capture(go_on)
        run()
    return Completions(rows.tokens, rows.lengths, rows.logprobs)


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
