"""Any causal language model of Hugging Face's transformers, as a model that engines can train.

The module keeps its class and its parameter names; only `forward` takes tokens and targets, and
`units` names the decoder layers. It is built with parameters on the meta device, and its buffers
(rotary frequencies, for instance) are real: they follow from the config.

Losses can do without whole logits: `head_inputs` takes what goes into the head. A vocabulary of
152,000 makes 3.5 GiB of logits and their gradients from 2048 tokens.

`check_causal` tests whether a model sees the tokens that it shall predict: BERT and its kin are
built as causal models and are none until their config says so, so they learn to copy the next
token. The model runs on the CPU with its last token changed: earlier logits may not change. It runs
small: the first layer of each kind, and as weights views of a short row of random numbers (w[i, j]
= row[i + j]), so that a layer takes the memory of its largest matrix, for the time of one product.
Neither weights nor a generator of the run are touched.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint

from zpp_lab import files
from zpp_lab.config.model import DOWNLOAD, ModelConfig, check_model_path
from zpp_lab.files import missing, package
from zpp_lab.models.generate import Cache, cached_logits, check_cached
from zpp_lab.models.hf_start import RandomStart, SavedStart
from zpp_lab.models.loss import chunked_losses, chunked_scores, mean_of, times
from zpp_lab.models.start import RunStart, Start

_TOKENS = 8
_MOVED = 1e-4  # of the largest logit; sums in another order move a millionth
_HEAD_ROWS = 64  # of a large head: as many logits tell
_LARGEST = 1 << 29  # elements of one matrix, 2 GiB

Build = Callable[[Any], nn.Module]


def check_causal(settings: Any, layers: str, build: Build) -> None:
    """ValueError where the model of build(settings), on the meta device, sees later tokens. layers:
    its ModuleList. Prints a line where that cannot be found out. Each model is checked once."""
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
    if seen:
        raise ValueError(
            f"{settings.model_type}: changing the last token changes earlier logits, so this model "
            "is not causal and its loss would be meaningless; add is_decoder: true to "
            "model.options (some families say is_causal or causal), or use a model that is trained "
            "to predict the next token, such as Llama or GPT-2"
        )


def sees_later(settings: Any, layers: str, build: Build) -> bool:
    """Return whether logits depend on later tokens. ValueError where they do not even depend on
    their own, or are not finite; whatever the model raises when it cannot run."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model: Any = _filled(build(copy.deepcopy(settings)), settings, layers)
        one, other = (model(input_ids=t, use_cache=False).logits.float() for t in _tokens(settings))
    moved = ((one - other).abs().amax(-1) / one.abs().amax())[0]
    if not moved.isfinite().all() or moved[-1] <= _MOVED:
        raise ValueError("its logits do not depend on its tokens")
    return bool((moved[:-1] > _MOVED).any())


def _say_unknown(kind: str, error: Exception) -> None:
    if os.environ.get("RANK", "0") == "0":  # the ranks would all say it
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(
            f"{kind}: could not verify causal masking ({why}); a held-out loss near 0 would mean "
            "that it is missing",
            file=sys.stderr,
        )


def _tokens(settings: Any) -> tuple[Tensor, Tensor]:
    """Return two rows of ordinary tokens, int64 [1, n], that differ in the last one."""
    text = settings.get_text_config()
    special = {v for k, v in text.to_dict().items() if k.endswith("token_id") and type(v) is int}
    plain = [i for i in range(min(text.vocab_size, 4 * _TOKENS)) if i not in special]
    positions = int(getattr(text, "max_position_embeddings", 0) or 0)
    length = max(2, min(_TOKENS, positions // 2 or _TOKENS))
    words = [plain[i % len(plain)] for i in range(length + 1)]
    return torch.tensor([words[:length]]), torch.tensor([[*words[: length - 1], words[length]]])


def _filled(model: Any, settings: Any, layers: str) -> nn.Module:
    """Give `model` few layers and weights that take no memory; to be run, not trained."""
    model.eval()
    parent, _, name = layers.rpartition(".")
    blocks = list(model.get_submodule(layers))
    # from the first to where each kind has come once, by the config's layer types
    kinds = list(getattr(settings.get_text_config(), "layer_types", None) or ())[: len(blocks)]
    kept = nn.ModuleList(blocks[: max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)])
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


def _shorten(head: Any) -> None:
    """Cut a large vocabulary's head to its first rows; meta parameters."""
    weight = getattr(head, "weight", None)
    if weight is None or weight.dim() != 2 or weight.numel() < 1 << 22:
        return
    for name in ("weight", "bias"):
        p = getattr(head, name, None)
        if p is not None:
            head._parameters[name] = nn.Parameter(p[:_HEAD_ROWS].detach(), False)


def _values(shape: torch.Size, scale: float, numbers: torch.Generator) -> Tensor:
    """Draw fp32 of `shape`, with scale or 1 / sqrt(columns) as deviation; vectors are about 1."""
    if len(shape) < 2:
        return 1 + 0.1 * torch.randn(shape, generator=numbers)
    if shape[-2:].numel() > _LARGEST and not scale:
        raise ValueError(f"a parameter of {list(shape)} is too large to try")
    row = torch.randn(sum(shape), generator=numbers) * (scale or shape[-1] ** -0.5)
    return row.as_strided(shape, (1,) * len(shape))


_FIX = "set model.loss_chunk=0"
_DROPOUT = ("dropout", "pdrop", "layerdrop")
_OTHER_HEADS = ("classifier", "summary")  # dropout of heads that no language model has


def check_head(model: Any) -> None:
    """ValueError when the head is more than one product."""
    head = model.get_output_embeddings()
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if weight is None or weight.dim() != 2 or bias is not None:
        raise ValueError(f"{type(model).__name__}: its head is not a single matrix: {_FIX}")


def head_inputs(model: Any, logits: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Run the model by logits() and return what its head multiplies: hidden states [batch · length,
    dim] and weight [vocab, dim]. ValueError when it changes logits after the head."""
    head = model.get_output_embeddings()
    return _before(head, logits, type(model).__name__).flatten(0, 1), head.weight


def _before(head: Any, logits: Callable[[], Tensor], name: str) -> Tensor:
    """Return what goes into the head, which passes it on while logits() runs."""
    given: list[Tensor] = []

    def through(x: Tensor) -> Tensor:
        given.append(x)
        return x

    head.forward = through
    try:
        out = logits()
    finally:
        del head.forward
    if len(given) != 1 or out is not given[0]:
        raise ValueError(f"{name} changes its logits after the head: {_FIX}")
    return given[0]


def build_hf(cfg: ModelConfig, vocab_size: int) -> nn.Module:
    """Build the model that `cfg` names, fp32, parameters on the meta device; not initialised.
    ValueError when transformers is not installed or does not know the model, when the vocabulary is
    smaller than the tokenizer's, for dropout, which no run could repeat, and for a model that is
    not causal."""
    settings = read_config(cfg)
    _check_vocabulary(cfg, settings, vocab_size)
    _check_dropout(settings)
    model = _meta_model(settings)
    units = find_units(model, cfg.units)
    check_causal(settings, units[0][0].rpartition(".")[0], _meta_model)
    if cfg.checkpoint_activations:
        for _, unit in units:
            unit.forward = partial(_checkpointed, unit.forward)  # type: ignore[method-assign]
    return _adapted(model, cfg, settings, units)


def read_config(cfg: ModelConfig) -> Any:
    """Read the transformers config of `model.path` or `model.options.model_type`."""
    check_model_path(cfg)
    library, options = package("transformers", "model=hf"), dict(cfg.options or {})
    if cfg.path is None:
        model_type = options.pop("model_type")
        try:
            base = library.AutoConfig.for_model(model_type)
        except ValueError:
            problem = f"model.options.model_type={model_type!r}: unknown to transformers"
            raise ValueError(problem) from None
        values: dict[str, Any] = {}
    else:
        base = _config_at(library, cfg.path)
        values = base.to_dict()
    unknown = sorted(key for key in options if not hasattr(base, key))
    if unknown:
        raise ValueError(
            f"model.options: {type(base).__name__}: unknown {', '.join(unknown)}; valid names: "
            f"{', '.join(sorted(base.to_dict()))}"
        )
    if cfg.vocab_size:
        options["vocab_size"] = cfg.vocab_size
    if "num_hidden_layers" in options:  # else one entry a layer is kept from the old depth
        values.pop("layer_types", None)
    try:
        return type(base).from_dict({**values, **options})
    except Exception as error:  # of several libraries
        raise ValueError(f"model.options: {type(base).__name__} rejects them: {error}") from None


def _config_at(library: Any, path: str) -> Any:
    """Read the config of a folder, a config.json, or a name on the Hub; without a network that
    comes from the Hub's cache, or the error does at once."""
    here = Path(path).exists()
    online = here or files.reachable()
    try:
        return library.AutoConfig.from_pretrained(path, local_files_only=not online)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
    if here:
        raise ValueError(
            f"model.path={path}: transformers cannot read its config ({first}); download it again"
        )
    name = f"model.path={path}: {missing(Path(path))}"
    if online:
        raise ValueError(f"{name}, and not found on the Hub ({first}); {DOWNLOAD}")
    raise ValueError(
        f"{name}, not in the Hub's cache, and {files.why_not()}: where there is a network, `hf "
        f"download {path} --local-dir FOLDER`, then model.path=FOLDER here"
    )


def find_units(model: nn.Module, named: str | None) -> list[tuple[str, nn.Module]]:
    """Return the modules of the ModuleList called `named`, or of the one with most weights. That
    list is the decoder's layers in every decoder-only model; lists inside a layer (experts) hold
    fewer."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList, so zpp_lab finds no layers; set model.units"
        )
    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in lists.items()}
    name = named or max(lists, key=lambda n: (sizes[n], -n.count(".")))
    if name not in lists:
        raise ValueError(f"model.units={name!r}: not a ModuleList; valid names: {', '.join(lists)}")
    chosen = [(f"{name}.{i}", m) for i, m in enumerate(lists[name])]
    return [(n, m) for n, m in chosen if any(True for _ in m.parameters())]


def _meta_model(settings: Any) -> nn.Module:
    def to_meta(module: nn.Module, name: str, p: nn.Parameter | None) -> nn.Parameter | None:
        if p is None or p.is_meta:  # a tied one comes again: the same object stays tied
            return p
        return nn.Parameter(p.detach().to("meta"), p.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with torch.random.fork_rng(devices=[]):
            build = package("transformers", "model=hf").AutoModelForCausalLM.from_config
            model: nn.Module = build(settings, dtype=torch.float32, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product" not in str(error):
            raise ValueError(f"{settings.model_type}: {str(error).splitlines()[0]}") from None
        model = build(settings, dtype=torch.float32, attn_implementation="eager")
    finally:
        hook.remove()
    return model.train()


def _adapted(
    model: nn.Module, cfg: ModelConfig, settings: Any, units: list[tuple[str, nn.Module]]
) -> nn.Module:
    """Give the same object our `forward`, `units` and `start`, by a subclass of its own class."""
    kind: Any = type(model)
    longest = int(getattr(settings, "max_position_embeddings", 0) or 0)
    chunk = cfg.loss_chunk
    if chunk:
        check_head(model)

    class CausalLM(kind):
        gives_token_scores = chunk > 0  # `each`: held-out losses need no whole logits either
        # a CUDA graph may hold forward and backward, unless layers are left out at random
        same_every_step = not any(
            value and "layerdrop" in name for name, value in settings.to_dict().items()
        )

        def forward(
            self,
            tokens: Tensor,
            targets: Tensor | None = None,
            share: Tensor | None = None,
            each: bool = False,
            cache: Cache | None = None,
        ) -> Tensor:
            """Return the mean cross-entropy in nats (fp32 scalar), see `mean_of` for `share`, or
            without targets logits [batch, length, vocab]. Tokens and targets: int64 [batch,
            length]. `each`, in chunks: every target's own scores, fp32 [2, batch · length].
            `cache`, for generation: logits [batch, vocab] of the places that it wants."""
            if cache is not None:
                check_cached(settings, cache.slots, longest)
                return cached_logits(self, super().forward, tokens, cache)
            if longest and tokens.shape[1] > longest:
                raise ValueError(f"data.seq_len={tokens.shape[1]}: use at most {longest}")
            if targets is None or not chunk:
                logits = self.all_logits(tokens)
                if targets is None:
                    return logits
                return mean_of(logits.flatten(0, 1), targets.flatten(), share)
            hidden, head = head_inputs(self, partial(self.all_logits, tokens))
            if each:
                return chunked_scores(hidden, head, targets.flatten(), chunk)
            losses = chunked_losses(hidden, head, targets.flatten(), chunk, cfg.z_loss)
            return losses.mean() if share is None else times(losses.sum(), share)

        def all_logits(self, tokens: Tensor) -> Tensor:
            found: Tensor = super().forward(input_ids=tokens, use_cache=False).logits
            return found

        def units(self) -> list[tuple[str, nn.Module]]:
            return units

        def start(self, seed: int) -> Start:
            twin = _meta_model(settings)  # ours may be sharded by now
            if cfg.start:
                return RunStart(twin, Path(cfg.start))
            if cfg.weights == "pretrained":
                return SavedStart(Path(str(cfg.path)), twin)
            return RandomStart(twin, seed)

    CausalLM.__name__ = CausalLM.__qualname__ = kind.__name__
    model.__class__ = CausalLM
    return model


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block again in backward, inside the unit's hooks, which gather once a pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _check_vocabulary(cfg: ModelConfig, settings: Any, vocab_size: int) -> None:
    own = settings.get_text_config().vocab_size
    if own < vocab_size:
        fix = "set model.vocab_size, or a smaller data.vocab_size"
        if cfg.weights == "pretrained":
            fix = "use its own tokenizer, data.tokenizer=hf data.tokenizer_path=FOLDER"
        raise ValueError(
            f"the model's vocabulary of {own} is smaller than the tokenizer's {vocab_size}: {fix}"
        )
    if cfg.weights == "pretrained" and cfg.vocab_size:
        raise ValueError("model.vocab_size must be 0 with model.weights=pretrained")


def _check_dropout(settings: Any) -> None:
    """Dropout draws from a generator that no engine shares: runs would not repeat."""
    found = [
        key
        for key, value in settings.get_text_config().to_dict().items()
        if any(word in key for word in _DROPOUT) and not key.startswith(_OTHER_HEADS)
        if isinstance(value, int | float) and value > 0
    ]
    if found:
        off = ", ".join(f"{key}: 0.0" for key in found)
        raise ValueError(f"{settings.model_type} has dropout; set model.options={{{off}}}")
