"""The decoder in tensor parts, with sequence parallelism and a vocabulary in parts.

A block is two residual pieces, x ← x + scatter(body(gather(norm(x)))): wq, wk, wv, gate and up are
cut by rows, wo and down by columns, embedding and head by vocabulary; every part has whole norms.
`hf_cut.py` makes such parts of transformers' models.
Between pieces each part has its slice of the tokens, batch and length as one dimension.

The same code runs one part, in a process of its own, and all parts in one process: `lanes` are the
parts of this process, and lists have a tensor for each. Gathers and scatters are nodes of the graph
over all lanes, which go through backward together. A piece uses x twice, so its gradient is a sum
of two terms, the same in either order.

The loss of a token follows from three numbers of each part: its largest logit, its sum of
exponentials relative to that, and the target's logit where the part has it. All parts add them up
in the same order, so all have the same loss, and backward needs no exchange but the head's.
Without targets the parts gather their logits, of which all of them compute the caller's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zpp_lab.config.model import ModelConfig
from zpp_lab.config.wires import ACTS_BACKWARD, ACTS_FORWARD, Wire
from zpp_lab.models.generate import Cache
from zpp_lab.models.llama import Block, Crossing, Llama, through
from zpp_lab.models.loss import IGNORED, times
from zpp_lab.models.start import SeededStart, Start, places

ROWS, COLUMNS = 0, 1
_ROWS = ("wq", "wk", "wv", "w_gate", "w_up", "embed", "head")
_HF_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
CUT = {  # module → the dimension along which its weight is cut; every part has others whole
    **dict.fromkeys((*_ROWS, *_HF_ROWS), ROWS),
    **dict.fromkeys(("wo", "w_down", "o_proj", "down_proj"), COLUMNS),
}


class Exchanges(Protocol):
    """What a model needs of `collectives.acts.Parts`."""

    def gather(self, wire: Wire, place: str, xs: Sequence[Tensor]) -> list[Tensor]: ...

    def scatter(self, wire: Wire, place: str, xs: Sequence[Tensor]) -> list[Tensor]: ...

    def raw(self, place: str, xs: Sequence[Tensor]) -> list[Tensor]: ...


class Watch(Protocol):
    """Looks at what a user training loop gives to a model."""

    def see(self, tokens: Tensor, given: Mapping[str, Any]) -> None:
        """Look at a forward's tokens and its other arguments."""
        ...

    def check(self, kind: str, values: Tensor, ignored: int | None = None) -> None:
        """Look for tokens or labels that are neither a class nor `ignored`."""
        ...

    def look_back(self, grad: Tensor) -> None:
        """Look at the gradient of a loss with respect to scores or whole logits."""
        ...


def cut_dim(name: str) -> int | None:
    """Return the dimension along which tensor parts cut the parameter; None: all have it whole."""
    return CUT.get(name.split(".")[-2])


def check_cut(cfg: ModelConfig, vocab_size: int, tp: int, sizes: Mapping[str, int]) -> None:
    """ValueError, naming the setting, where this model has no `tp` parts. sizes: by their settings,
    what parts divide."""
    said = f"cluster.tp={tp}"
    for ok, what in (
        (not cfg.scalar_head, "model.scalar_head=true: use false"),
        (not cfg.lora.on, "model.lora: leave it out"),
        (not cfg.checkpoint_activations, "model.checkpoint_activations=true: use false"),
        (not cfg.loss_chunk, f"model.loss_chunk={cfg.loss_chunk}: use 0"),
        (not cfg.z_loss, f"model.z_loss={cfg.z_loss:g}: use 0"),
    ):
        if not ok:
            raise ValueError(f"{said} is not built for {what}")
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(f"{said} does not divide model.{name}={size}: change either")
    if vocab_size % tp:
        raise ValueError(
            f"{said} does not divide the vocabulary of {vocab_size}: set model.vocab_size="
            f"{-(-vocab_size // tp) * tp}"
        )


def decoder_sizes(cfg: ModelConfig) -> dict[str, int]:
    """Return what parts of the built-in decoder divide."""
    return {"heads": cfg.heads, "kv_heads": cfg.kv_heads, "ffn": cfg.ffn}


def cut_parameters(model: nn.Module, tp: int, part: int = 0) -> None:
    """Replace a whole model's parameters by those of one of its `tp` parts; ties stay. ValueError
    for a matrix that parts do not know."""
    hangs, every = places(model), list(model.named_parameters())
    if unknown := [name for name, p in every if p.ndim > 1 and cut_dim(name) is None]:
        raise ValueError(
            f"tp={tp} is not built for {unknown[0]}: leave adapters and further heads out, or use "
            "tp=1"
        )
    for name, p in every:
        if cut_dim(name) is not None:
            own = part_of(name, p.detach(), tp, part).clone(memory_format=torch.contiguous_format)
            new = nn.Parameter(own, p.requires_grad)
            for owner, attribute in hangs[id(p)]:
                owner._parameters[attribute] = new


def under(mixin: type, kind: type) -> type:
    """Return `kind` with `mixin` before it, under its own name."""
    return type(kind.__name__, (mixin, kind), {})


class Parted(nn.Module):
    """Part `part` of `tp` of a model; names of parameters are the whole model's. `join` comes
    before the first forward."""

    gives_token_scores = True
    crossing: Crossing = staticmethod(lambda block, xs: xs)  # what follows each block
    lanes: tuple[Any, ...]
    exchanges: Exchanges | None
    watch: Watch | None = None
    tp: int
    part: int
    embed: nn.Embedding
    norm: nn.Module
    units: Callable[[], list[tuple[str, nn.Module]]]
    _head: Callable[[], Tensor]

    def join(self, lanes: Sequence[Parted], exchanges: Exchanges | None) -> None:
        """Run these parts together, in their order; the first one is called."""
        self.lanes, self.exchanges = tuple(lanes), exchanges
        for named in zip(*(lane.units() for lane in lanes), strict=True):
            blocks: tuple[Any, ...] = tuple(block for _, block in named)
            for block in blocks:
                block.place, block.lanes, block.model = named[0][0], blocks, (self,)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        share: Tensor | None = None,
        each: bool = False,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return as `Llama.forward`: the mean cross-entropy, or logits when there are no targets,
        or with `each` every target's scores."""
        assert cache is None, "parts do not generate"
        self.see(tokens, labels=targets, share=share)
        xs = self.enter(tokens)
        for i, (_, block) in enumerate(self.units()):
            xs = self.crossing(i, through(block, xs))
        if targets is None:
            xs = [lane.norm(x) for lane, x in zip(self.lanes, xs, strict=True)]
            return self.whole_logits(self.part_logits(xs))
        return self.leave(xs, targets, share, each)

    def see(self, tokens: Tensor, **given: Any) -> None:
        """Prepare a forward of these tokens, wherever it begins. given: its other arguments, under
        the same names in each part."""
        self.shape = tuple(tokens.shape)
        if self.watch is not None:
            self.watch.see(tokens, given)

    def enter(self, tokens: Tensor) -> list[Tensor]:
        assert self.exchanges is not None, "join comes first"
        return scatter(self.exchanges, "embed", [lane._embed(tokens) for lane in self.lanes])

    def leave(
        self, xs: Sequence[Tensor], targets: Tensor, share: Tensor | None = None, each: bool = False
    ) -> Tensor:
        xs = [lane.norm(x) for lane, x in zip(self.lanes, xs, strict=True)]
        self.check(targets, IGNORED)
        scores = self.scores(self.part_logits(xs), targets.flatten(), each)
        if each:
            return scores
        losses = scores[0]
        if share is not None:
            return times(losses.sum(), share)
        return losses.sum() / (targets != IGNORED).sum()

    def part_logits(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Multiply what the last norm gave with the head: [N, vocab / tp] of each part."""
        assert self.exchanges is not None, "join comes first"
        xs = gather(self.exchanges, "head", xs)
        return [F.linear(x, lane._head()) for lane, x in zip(self.lanes, xs, strict=True)]

    def scores(self, logits: Sequence[Tensor], targets: Tensor, each: bool = False) -> Tensor:
        """Return the scores of targets [N], as `_PartLoss`."""
        made: Tensor = _PartLoss.apply(self.exchanges, targets, self._first(logits), each, *logits)
        return self._watched(made)

    def check(self, targets: Tensor, ignored: int) -> None:
        if self.watch is not None:
            self.watch.check("labels", targets, ignored)

    def whole_logits(self, logits: Sequence[Tensor]) -> Tensor:
        """Bring every part all logits: [batch, length, vocab]."""
        made: Tensor = _WholeLogits.apply(self.exchanges, self._first(logits), self.shape, *logits)
        return self._watched(made)

    def _watched(self, made: Tensor) -> Tensor:
        if self.watch is not None and made.requires_grad:
            made.register_hook(self.watch.look_back)
        return made

    def _first(self, logits: Sequence[Tensor]) -> list[int]:
        """Return each part's first class."""
        return [lane.part * x.shape[1] for lane, x in zip(self.lanes, logits, strict=True)]

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embed those tokens that this part has; zeros for others: [N, dim]."""
        own = tokens.flatten() - self.part * self.embed.weight.shape[0]
        absent = (own < 0) | (own >= self.embed.weight.shape[0])
        rows = self.embed(own.masked_fill(absent, 0))
        return rows.masked_fill(absent[:, None], 0.0)

    def parts_of(self, name: str) -> int:
        """Return into how many parts the parameter is cut."""
        return 1 if cut_dim(name) is None else self.tp


class PartLlama(Parted, Llama):  # type: ignore[misc]
    """A part of the decoder."""

    def __init__(self, cfg: ModelConfig, vocab_size: int, tp: int, part: int) -> None:
        Llama.__init__(self, cfg, vocab_size)
        self.tp, self.part = tp, part
        self.layers = nn.ModuleList(PartBlock(cfg, self.rope) for _ in range(cfg.layers))
        cut_parameters(self, tp)
        self.join((self,), None)

    def see(self, tokens: Tensor, **given: Any) -> None:
        Parted.see(self, tokens, **given)
        for lane in self.lanes:
            Llama.see(lane, tokens)

    def start(self, seed: int) -> Start:
        return PartStart(whole_start(self, seed), self)


def whole_start(model: Llama, seed: int) -> Start:
    """Return the start of the whole decoder of which `model` is a part; on its device."""
    with torch.device("meta"):
        start = Llama(model.cfg, model.vocab_size).start(seed)
    if isinstance(start, SeededStart):
        start.device = next(model.parameters()).device
    return start


class PartPieces(nn.Module):
    """A layer of one part; called with the tokens' slices of all lanes."""

    pieces = (("attention_norm", "attention"), ("mlp_norm", "mlp"))
    place: str  # its name in the model
    lanes: tuple[Any, ...]
    model: tuple[Any]  # in a tuple, so that it is no submodule

    def forward(self, *xs: Tensor) -> Any:
        (norm, first), (_, second) = self.pieces
        normed = [getattr(b, norm)(x) for b, x in zip(self.lanes, xs, strict=True)]
        xs, normed = self._between(xs, self._exchanged(first, normed))
        sums = self._exchanged(second, normed)
        xs = tuple(x + y for x, y in zip(xs, sums, strict=True))
        return xs if len(xs) > 1 else xs[0]

    def between(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """End the first piece: x + y, and its norm, with which the second begins."""
        x = x + y
        normed: Tensor = getattr(self, self.pieces[1][0])(x)
        return x, normed

    def run(self, body: str, x: Tensor) -> Tensor:
        """Compute a piece's body from all tokens [batch, length, dim]: this part's term."""
        made: Tensor = getattr(self, body)(x)
        return made

    def _between(
        self, xs: Sequence[Tensor], sums: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        # a method, so that nothing holds the norms before and the sums during the second exchange
        both = [b.between(x, y) for b, x, y in zip(self.lanes, xs, sums, strict=True)]
        return tuple(x for x, _ in both), [normed for _, normed in both]

    def _exchanged(self, body: str, normed: Sequence[Tensor]) -> list[Tensor]:
        """Run a body on all tokens: each lane's slice of the sum."""
        (model,), place = self.model, f"{self.place}.{body}"
        assert model.exchanges is not None
        every = gather(model.exchanges, place, normed)
        rows = (x.view(*model.shape, -1) for x in every)
        made = [b.run(body, x).flatten(0, 1) for b, x in zip(self.lanes, rows, strict=True)]
        return scatter(model.exchanges, place, made)


class PartBlock(PartPieces, Block):  # type: ignore[misc]
    """A decoder layer of one part."""

    def regions(self) -> list[tuple[nn.Module, str]]:
        """Return what is compiled, as modules and methods: what lies between two exchanges, but for
        the lone norm before the first and the sum after the last, a kernel each."""
        return [(self.attention, "forward"), (self, "between"), (self.mlp, "forward")]


class PartStart(Start):
    """A part's rows of whole first weights."""

    def __init__(self, start: Start, model: Parted) -> None:
        self.whole, self.tp, self.part = start, model.tp, model.part
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}

    def rows(self, name: str, first: int, last: int) -> Tensor:
        dim, shape = cut_dim(name), self.shapes[name]
        if dim is None:
            return self.whole.rows(name, first, last)
        if dim == ROWS:
            above = self.part * shape[0]
            return self.whole.rows(name, above + first, above + last)
        left = self.part * shape[1]
        return self.whole.rows(name, first, last)[:, left : left + shape[1]]

    def buffer(self, name: str) -> Tensor | None:
        return self.whole.buffer(name)


def merged(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Join the parts of a parameter, or of a tensor of its shape."""
    dim = cut_dim(name) if parts[0].ndim else None
    return parts[0] if dim is None else torch.cat(list(parts), dim)


def part_of(name: str, value: Tensor, tp: int, part: int) -> Tensor:
    """Return a part of a whole parameter, or of a tensor of its shape."""
    dim = cut_dim(name) if value.ndim else None
    return value if dim is None else value.chunk(tp, dim)[part]


def map_state(state: Mapping[str, Any], make: Callable[[str, Tensor], Any]) -> dict[str, Any]:
    """Apply `make` to names and tensors of a state, which is nested dictionaries."""
    return {
        name: map_state(value, make) if isinstance(value, dict) else make(name, value)
        for name, value in state.items()
    }


def merged_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all tensor parts' cells into the whole model's."""
    every = {name: [state[name] for state in states] for name in states[0]}
    return {
        name: merged_state(values) if isinstance(values[0], dict) else merged(name, values)
        for name, values in every.items()
    }


def part_state(state: Mapping[str, Any], tp: int, part: int) -> dict[str, Any]:
    """Return a tensor part's share of the whole model's state: of all that lies by parameter."""
    kinds = ("weights", "low", "optimizer", "kept")
    own = {kind: state[kind] for kind in kinds if kind in state}
    return map_state(own, lambda name, value: part_of(name, value, tp, part))


# ---------------------------------------------------------------------- nodes of the graph


def gather(exchanges: Exchanges, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
    """Bring all tokens to every lane; backward sums their gradients."""
    return list(_Exchange.apply(exchanges.gather, exchanges.scatter, place, *xs))


def scatter(exchanges: Exchanges, place: str, xs: Sequence[Tensor]) -> list[Tensor]:
    """Sum all parts' terms, a slice of the tokens for each lane; backward gathers gradients."""
    return list(_Exchange.apply(exchanges.scatter, exchanges.gather, place, *xs))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ahead: Any, back: Any, place: str, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.back, ctx.place = back, place
        return tuple(ahead(ACTS_FORWARD, place, [x.contiguous() for x in xs]))

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        own = [g.contiguous() for g in grads]
        return None, None, None, *ctx.back(ACTS_BACKWARD, ctx.place, own)


class _PartLoss(torch.autograd.Function):
    """Local logits [N, vocab / tp] of these parts → each target's scores [1, N] in fp32 (fp64 for
    fp64): its loss, 0 where it is IGNORED. With `hits` [2, N]: also 1 where the model predicts it.
    All parts have the same. `first`: each part's first class."""

    @staticmethod
    def forward(
        ctx: Any,
        exchanges: Exchanges,
        targets: Tensor,
        first: Sequence[int],
        hits: bool,
        *logits: Tensor,
    ) -> Tensor:
        own = [_numbers(x, targets - f) for x, f in zip(logits, first, strict=True)]
        if hits:
            found = [x.argmax(-1) == targets - f for x, f in zip(logits, first, strict=True)]
            own = [torch.cat((n, h[None].to(n))) for n, h in zip(own, found, strict=True)]
        every = exchanges.raw("loss", own)[0]  # [tp, 3 or 4, N]
        top, logsum, logit = _combined(every)
        ctx.first = first
        ctx.save_for_backward(targets, logsum, *logits)
        losses = (logsum - logit).masked_fill(targets == IGNORED, 0.0)
        if not hits:
            return losses[None]
        leads = (every[:, 0] == top).to(torch.uint8).argmax(0)  # the first part with the largest
        return torch.stack((losses, every[:, 3].gather(0, leads[None])[0]))

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        targets, logsum, *logits = ctx.saved_tensors
        grad = grad[0].masked_fill(targets == IGNORED, 0.0)
        made = []
        for x, first in zip(logits, ctx.first, strict=True):
            to_logits = (x.to(logsum.dtype) - logsum[:, None]).exp_()
            classes = torch.arange(first, first + x.shape[1], device=x.device)
            to_logits.add_(classes == targets[:, None], alpha=-1)
            made.append(to_logits.mul_(grad[:, None]).to(x.dtype))
        return None, None, None, None, *made


class _WholeLogits(torch.autograd.Function):
    """Local logits [N, vocab / tp] of these parts → all logits [*shape, vocab], of which every part
    then computes the same. `first`: each part's first class."""

    @staticmethod
    def forward(
        ctx: Any,
        exchanges: Exchanges,
        first: Sequence[int],
        shape: Sequence[int],
        *logits: Tensor,
    ) -> Tensor:
        ctx.first, ctx.width = first, logits[0].shape[1]
        every = exchanges.raw("logits", [x.contiguous() for x in logits])[0]  # [tp, N, vocab / tp]
        # not a view, which callers could not change in place
        return torch.cat([part.view(*shape, -1) for part in every], -1)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        flat = grad.flatten(0, -2)
        return None, None, None, *(flat[:, first : first + ctx.width] for first in ctx.first)


def _numbers(logits: Tensor, own: Tensor) -> Tensor:
    """Return [3, N]: the largest logit, the sum of exponentials relative to it, and the logit of
    class `own`, 0 where it is not among these."""
    values = logits if logits.dtype == torch.float64 else logits.float()
    top = values.amax(-1)
    sums = (values - top[:, None]).exp_().sum(-1)
    absent = (own < 0) | (own >= values.shape[1])
    logit = values.gather(1, own.masked_fill(absent, 0)[:, None])[:, 0].masked_fill(absent, 0.0)
    return torch.stack((top, sums, logit))


def _combined(every: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit, log of the sum of exponentials, and the target's logit, [N] each,
    from all parts' numbers [tp, 3 or more, N], added in the parts' order."""
    top = every[:, 0].amax(0)
    total, logit = torch.zeros_like(top), torch.zeros_like(top)
    for part in every:
        total = total + part[1] * (part[0] - top).exp()
        logit = logit + part[2]
    return top, total.log() + top, logit
