"""Cross-entropy: its mean over what counts, and straight from hidden states in chunks of tokens.

Targets that are IGNORED do not count. A mean over the counted tokens of one micro-batch would weigh
a token by how few others its batch has, so a masked batch comes with its share: ranks × micro-steps
over the counted tokens of the whole step. Loss and gradient are then the sum over the batch's
counted tokens times the share, and the mean over ranks and micro-steps that every engine takes
anyway is the mean over the step's counted tokens, with equal weights. The share is two integers,
since a sharding engine may round floats that enter a model to its parameters' dtype.

Logits of 4096 tokens over a vocabulary of 32,000 and what a loss keeps of them take 1.5 GiB. With
chunks (`chunked_losses`) the logits of one chunk exist at a time, in forward and again in backward,
where they are computed again; between the two nothing is kept but what goes in. Each chunk's
softmax runs in fp32. The head's gradient is added up over chunks in fp32 and rounded to the
weight's dtype once. Nothing is scattered and no host waits: a run repeats to the bit and a CUDA
graph can hold it. Token losses are those of the whole logits wherever the device's matrix product
gives a row the same bits in a smaller product; the mean and the gradients are added up in another
order, so a run with chunks has bits of its own.

A z-loss (Chowdhery et al. 2022, "PaLM", section 5: 1e-4) pulls logsumexp of the logits to 0. It is
in the gradient alone: reported losses, of training and held out, stay cross-entropy, so that
runs with it and without compare. Its gradient is a factor of the softmax, so it goes through the
chunks, of which one may hold all tokens, and takes no memory.

The held-out loss is taken token by token, so that a mean never depends on how tokens were batched.
Sums are rounded once (`math.fsum`): they are the same in any order, for any split into documents,
batches and ranks. Whether a token was predicted is read from the same logits, as the model's dtype
has them; equal logits are common in bf16, and of those the lowest index is the prediction.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zpp_lab.data.packed import IGNORED
from zpp_lab.models import fused


def heldout_size(length: int) -> int:
    """Return the sequences of a held-out batch, of so many tokens each."""
    return max(1, min(64, 8192 // length))


def token_scores(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Score every counted target: fp32 [2, B · T or fewer], row by row of the batch.

    Returns the cross-entropy in nats, and 1 where the model predicts the target, else 0.
    model(inputs) gives logits [B, T, vocab]; inputs, targets: int64 [B, T], and IGNORED targets
    are left out. A model that `gives_token_scores` is asked for the scores themselves, which it
    may compute without whole logits: model(inputs, targets, each=True).
    """
    if getattr(model, "gives_token_scores", False):
        scores: Tensor = model(inputs, targets, each=True)
    else:
        scores = whole_scores(model(inputs).flatten(0, 1), targets.flatten())
    return scores[:, targets.flatten() != IGNORED]


def token_losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of `token_scores`, fp32 [B · T or fewer]."""
    return token_scores(model, inputs, targets)[0]


def whole_scores(logits: Tensor, targets: Tensor) -> Tensor:
    """Score logits [N, vocab] against int64 targets [N]: fp32 [2, N], as `token_scores`."""
    return torch.stack((cross_entropy(logits, targets, "none"), _predicted(logits, targets)))


def chunked_scores(hidden: Tensor, head: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Score targets [N] as `whole_scores` does, with logits of `chunk` rows at a time. The losses
    have the bits of `chunked_losses`, whose arguments these are. Where a backward may follow,
    losses alone, fp32 [1, N]."""
    if torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad):
        return chunked_losses(hidden, head, targets, chunk)[None]
    found = []
    for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        logits = F.linear(h, head)
        found.append(torch.stack((_losses(logits, t), _predicted(logits, t))))
    return torch.cat(found, 1)


def _predicted(logits: Tensor, targets: Tensor) -> Tensor:
    """Return 1 where the target is the first of the row's largest logits, else 0; fp32 [N]."""
    return (logits.argmax(-1) == targets).float()  # torch gives the first of equal ones


def counted(targets: Tensor) -> int:
    """Return how many of the targets the loss counts."""
    return int((targets != IGNORED).sum())


def mean_loss(losses: Tensor) -> float:
    """Return the mean of fp32 token losses [N], in nats: the exact sum in fp64 over N."""
    return total_loss(losses) / losses.numel()


def total_loss(losses: Tensor) -> float:
    """Return the exact sum of fp32 values [N], rounded once; NaN or infinite where they are."""
    values = losses.tolist()
    total = math.fsum(v for v in values if math.isfinite(v))
    return total + sum(v for v in values if not math.isfinite(v))


def mean_of(logits: Tensor, targets: Tensor, share: Tensor | None) -> Tensor:
    """Return the cross-entropy in nats, an fp32 scalar: the mean, or the counted sum times a share.
    logits [N, vocab] of any floating dtype, targets int64 [N], share int64 [2]: a fraction."""
    if share is None:
        return cross_entropy(logits, targets, "mean")
    return times(cross_entropy(logits, targets, "sum"), share)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Return the cross-entropy of logits [N, vocab], widened to fp32, and int64 targets [N], of
    which IGNORED ones do not count; in nats, fp32. reduction: mean, sum, or none for [N], as
    torch's. On a GPU one kernel each way (`fused.log_probs`) with the bits of torch's. It gives
    each row's target; the mean over rows and its gradient are torch's there too."""
    if not fused.serves(logits):
        return F.cross_entropy(logits.float(), targets, reduction=reduction, ignore_index=IGNORED)
    vocab = logits.shape[1]
    made = fused.log_probs(logits, targets.clamp(0, vocab - 1))[:, None]
    # class 0 is all that `made` has; a target beyond the vocabulary becomes 1, which torch refuses
    own = targets.clamp_max(0).masked_fill(targets >= vocab, 1)
    return F.nll_loss(made, own, reduction=reduction, ignore_index=IGNORED)


def times(total: Tensor, share: Tensor) -> Tensor:
    """Return total · share[0] / share[1], the fraction rounded to fp32 first."""
    return total * (share[0].float() / share[1].float())


def chunked_losses(
    hidden: Tensor, head: Tensor, targets: Tensor, chunk: int, z_loss: float = 0.0
) -> Tensor:
    """Return the cross-entropy of every target in nats, fp32 [N]; 0 where it is IGNORED. hidden [N,
    dim] and head [vocab, dim] of one floating dtype, targets int64 [N]; logits are hidden · headᵀ,
    `chunk` rows at a time. The gradient is that of the loss + z_loss · logsumexp(logits)², both of
    targets that count."""
    assert chunk >= 1, "0 is for those who want whole logits"
    losses: Tensor = _ChunkedLosses.apply(hidden, head, targets, chunk, z_loss)
    return losses


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, chunk: int, z_loss: float
    ) -> Tensor:
        ctx.save_for_backward(hidden, head, targets)
        ctx.chunk, ctx.z_loss = chunk, z_loss
        pairs = zip(hidden.split(chunk), targets.split(chunk), strict=True)
        return torch.cat([_losses(F.linear(h, head), t) for h, t in pairs])

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """grad: fp32 [N]."""
        hidden, head, targets = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_head = _HeadGrad(head, hidden.shape[0] > ctx.chunk) if ctx.needs_input_grad[1] else None
        for first in range(0, hidden.shape[0], ctx.chunk):
            part = slice(first, first + ctx.chunk)
            to_logits = _logit_grads(hidden[part], head, targets[part], grad[part], ctx.z_loss)
            if to_hidden is not None:
                torch.mm(to_logits, head, out=to_hidden[part])
            if to_head is not None:
                to_head.add(to_logits.t() @ hidden[part])
            del to_logits  # before the next chunk's are made
        return to_hidden, to_head.value() if to_head else None, None, None, None


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    logs = torch.log_softmax(logits, -1, dtype=torch.float32)
    losses = -logs.gather(1, targets.clamp_min(0)[:, None]).squeeze(1)
    return losses.masked_fill_(targets == IGNORED, 0.0)


def _logit_grads(
    hidden: Tensor, head: Tensor, targets: Tensor, grad: Tensor, z_loss: float
) -> Tensor:
    """Return ((1 + 2 · z_loss · logsumexp) · softmax - target one-hot) · grad, [C, vocab]."""
    grad = grad.masked_fill(targets == IGNORED, 0.0)
    logits = F.linear(hidden, head)
    made = torch.softmax(logits, -1, dtype=torch.float32)
    if z_loss:  # at the largest logit its softmax, which is no less than 1 / vocab, tells logsumexp
        made.mul_((1 + 2 * z_loss * (logits.amax(-1).float() - made.amax(-1).log()))[:, None])
    del logits
    made.add_(torch.arange(head.shape[0], device=head.device) == targets[:, None], alpha=-1)
    return made.mul_(grad[:, None]).to(head.dtype)


class _HeadGrad:
    """The sum of the chunks' parts, in fp32 when there are several."""

    def __init__(self, head: Tensor, several: bool) -> None:
        self.dtype = head.dtype
        self.sum = torch.zeros_like(head, dtype=torch.float32) if several else None

    def add(self, part: Tensor) -> None:
        self.sum = part if self.sum is None else self.sum.add_(part)

    def value(self) -> Tensor:
        assert self.sum is not None, "no chunk was added"
        return self.sum.to(self.dtype)
