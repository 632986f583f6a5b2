"""Why a bf16 run and its folder have other losses: python experiments/qexport/decoders.py RUN

Both sides get the very same weights, those of the run's wire. transformers' decoder is measured as
it is, then with our norm, with our rotary positions, and with both; at last all compute in fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
import transformers.models.llama.modeling_llama as theirs
from torch import Tensor
from transformers import LlamaConfig

from zpp_lab.config.schema import Config
from zpp_lab.data import open_data
from zpp_lab.models import build_model
from zpp_lab.models.loss import mean_loss, token_losses
from zpp_lab.tools.export.model import open_run
from zpp_lab.tools.export.target import target_of
from zpp_lab.tools.export.wire import WireWeights
from zpp_lab.train.evaluation import open_heldout

Model = Callable[[Tensor], Tensor]
ROTATE = theirs.apply_rotary_pos_emb


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    config, saved = open_run(Path(sys.argv[1]))
    if config.model.name != "llama":
        sys.exit("transformers' own models are computed by transformers on both sides")
    wire, target = WireWeights(config, saved), target_of(config, saved)
    weights = {n: wire.decoded(n) for n in saved.shapes}
    rows = saved.shapes["embed.weight"][0]
    ours = build_model(config.model, rows, "cpu").to(wire.dtype)
    ours.load_state_dict(weights)
    base = loss(ours, config)
    print(f"zpp_lab, {config.train.param_dtype}: {base:.9f}")
    model = theirs.LlamaForCausalLM(LlamaConfig(**target.config)).eval()
    for p in model.parameters():  # as buffers stay in fp32, so do the rotary frequencies
        p.data = p.data.to(wire.dtype)
    model.load_state_dict({target.names[n]: target.arrange(n, w) for n, w in weights.items()})
    for norm, rotary in ((False, False), (True, False), (False, True), (True, True)):
        with_ours(model, norm, rotary)
        gap = loss(lambda x: model(input_ids=x, use_cache=False).logits, config) - base
        print(f"transformers, {norm=}, {rotary=} as ours: {gap:+.1e}")
    with_ours(model, False, False)
    for p in (*ours.parameters(), *model.parameters()):
        p.data = p.data.float()
    alike = loss(lambda x: model(input_ids=x, use_cache=False).logits, config) - loss(ours, config)
    print(f"transformers − zpp_lab, both fp32: {alike:+.1e}")


@torch.no_grad()
def loss(model: Any, config: Config) -> float:
    batches = open_heldout(config, open_data(config.data)).batches
    return mean_loss(torch.cat([token_losses(model, x, y) for x, y in batches]))


def with_ours(model: Any, norm: bool, rotary: bool) -> None:
    """Rounds to bf16 once after a norm, and turns by fp32 positions, as the trainer does."""
    for m in model.modules():
        if isinstance(m, theirs.LlamaRMSNorm):
            m.forward = MethodType(_norm if norm else theirs.LlamaRMSNorm.forward, m)
    turn = model.model.rotary_emb
    turn.forward = MethodType(_tables if rotary else theirs.LlamaRotaryEmbedding.forward, turn)
    theirs.apply_rotary_pos_emb = _rotate if rotary else ROTATE


def _norm(self: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)


def _tables(self: Any, x: Tensor, position_ids: Tensor) -> Any:
    return theirs.LlamaRotaryEmbedding.forward(self, x.float(), position_ids)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    turned = ROTATE(q.float(), k.float(), cos, sin, unsqueeze_dim)
    return tuple(t.to(q.dtype) for t in turned)


if __name__ == "__main__":
    main()
