"""Does a model of transformers see the tokens that it shall predict? Asked before it trains.

BERT and its kin are built as causal models and are none until their config says so: they learn to
copy the next token, and their loss falls to nothing.

The model itself is asked, on the CPU, with its last token changed: what it says of the tokens
before may not move. It is asked without its size: of its layers the first of each kind, and as
weights views of a short row of random numbers (w[i, j] = row[i + j]), so that a layer takes the
memory of its largest matrix, for the time of one product. Neither weights nor a generator of the
run are touched.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

_TOKENS = 8
_MOVED = 1e-4  # of the largest logit; sums in another order move a millionth
_HEAD_ROWS = 64  # of a large head: as many logits tell
_LARGEST = 1 << 29  # elements of one matrix, 2 GiB
_MASKS = ("is_decoder", "is_causal", "causal")  # how configs call it

Build = Callable[[Any], nn.Module]


def check_causal(settings: Any, layers: str, build: Build) -> None:
    """ValueError where the model that build(settings) makes, on the meta device, sees later tokens;
    it names the setting that helps. layers: its ModuleList. Where that cannot be found out, a line
    on stderr says so. A model is asked once in a process.
    """
    kind: Any = type(settings)
    _check(kind, settings.to_json_string(use_diff=False), layers, build)


@cache
def _check(kind: Any, text: str, layers: str, build: Build) -> None:
    settings = kind.from_dict(json.loads(text))
    try:
        seen = sees_later(settings, layers, build)
    except Exception as error:  # of somebody else's code
        _say_unknown(settings.model_type, error)
        return
    if not seen:
        return
    helps = next((name for name in _MASKS if _helped(settings, name, layers, build)), None)
    fix = "take a model that is trained to predict the next token, such as Llama or GPT-2"
    if helps:
        fix = (
            f'add {helps}: true to model.options (or "{helps}": true to its config.json), or {fix}'
        )
    raise ValueError(
        f"{settings.model_type}: another last token changes the logits of the tokens before it, so "
        f"this model sees what it shall predict, and its loss would say nothing; {fix}"
    )


def sees_later(settings: Any, layers: str, build: Build) -> bool:
    """Whether logits depend on tokens after their own. ValueError where they do not even depend on
    their own, or are not finite; whatever the model raises when it cannot run."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model: Any = _filled(build(copy.deepcopy(settings)), settings, layers)
        tokens = _tokens(settings)
        one, other = (model(input_ids=t, use_cache=False).logits.float() for t in tokens)
    moved = ((one - other).abs().amax(-1) / one.abs().amax())[0]
    if not moved.isfinite().all() or moved[-1] <= _MOVED:
        raise ValueError("its logits do not follow its tokens")
    return bool((moved[:-1] > _MOVED).any())


def _helped(settings: Any, name: str, layers: str, build: Build) -> bool:
    if getattr(settings, name, None) is not False:
        return False
    changed = copy.deepcopy(settings)
    setattr(changed, name, True)
    try:
        return not sees_later(changed, layers, build)
    except Exception:  # of somebody else's code: then it is no help
        return False


def _say_unknown(kind: str, error: Exception) -> None:
    if os.environ.get("RANK", "0") == "0":  # the ranks would all say it
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(
            f"{kind}: whether it sees the tokens that it shall predict is not known ({why}); a "
            "held-out loss near 0 would mean that it does",
            file=sys.stderr,
        )


def _tokens(settings: Any) -> tuple[Tensor, Tensor]:
    """Two rows of tokens, int64 [1, n], that differ in the last one; none has a special meaning."""
    text = settings.get_text_config()
    special = {v for k, v in text.to_dict().items() if k.endswith("token_id") and type(v) is int}
    plain = [i for i in range(min(text.vocab_size, 4 * _TOKENS)) if i not in special]
    positions = int(getattr(text, "max_position_embeddings", 0) or 0)
    length = max(2, min(_TOKENS, positions // 2 or _TOKENS))
    words = [plain[i % len(plain)] for i in range(length + 1)]
    return torch.tensor([words[:length]]), torch.tensor([[*words[: length - 1], words[length]]])


def _filled(model: Any, settings: Any, layers: str) -> nn.Module:
    """`model` with few layers and weights that take no memory; to be run, not trained."""
    model.eval()
    parent, _, name = layers.rpartition(".")
    blocks = list(model.get_submodule(layers))
    kept = nn.ModuleList(blocks[: _enough(settings, len(blocks))])
    setattr(model.get_submodule(parent), name, kept)
    _shorten(model.get_output_embeddings())
    numbers = torch.Generator().manual_seed(0)
    for module in model.modules():
        if hasattr(module, "config"):  # experts one by one: torch multiplies no such views at once
            module.config._experts_implementation = "eager"
        scale = 1.0 if isinstance(module, nn.Embedding) else 0.0
        for own, p in module._parameters.items():
            if p is not None and p.is_meta:
                module._parameters[own] = nn.Parameter(_values(p.shape, scale, numbers), False)
    return cast(nn.Module, model)


def _enough(settings: Any, layers: int) -> int:
    """Layers from the first to where each kind has come once, as far as the config tells kinds."""
    kinds = list(getattr(settings.get_text_config(), "layer_types", None) or ())[:layers]
    return max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)


def _shorten(head: Any) -> None:
    """A large vocabulary's head to its first rows; meta parameters."""
    weight = getattr(head, "weight", None)
    if weight is None or weight.dim() != 2 or weight.numel() < 1 << 22:
        return
    for name in ("weight", "bias"):
        p = getattr(head, name, None)
        if p is not None:
            head._parameters[name] = nn.Parameter(p[:_HEAD_ROWS].detach(), False)


def _values(shape: torch.Size, scale: float, numbers: torch.Generator) -> Tensor:
    """Random fp32 of `shape`, with scale or 1 / sqrt(columns) as deviation; vectors are about 1."""
    if len(shape) < 2:
        return 1 + 0.1 * torch.randn(shape, generator=numbers)
    if shape[-2:].numel() > _LARGEST and not scale:
        raise ValueError(f"a parameter of {list(shape)} is too large to be tried")
    row = torch.randn(sum(shape), generator=numbers) * (scale or shape[-1] ** -0.5)
    return row.as_strided(shape, (1,) * len(shape))
