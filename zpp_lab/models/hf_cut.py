"""Tensor parts of transformers' Llama, Mistral, Qwen2 and Qwen3.

A part is the whole module of transformers with its matrices cut, as `cut.py` cuts the decoder's:
its attention counts heads by the projections' rows. Norms, attention and MLP are transformers' own,
so are rotary positions of every kind; the order around them, embedding, head and loss are
`cut.py`'s. Other families differ in what surrounds the modules, such as Gemma's scaled embeddings,
although their `base_model_tp_plan` is the same.

In a user training loop (`zpp_lab.shard`) the model keeps the forward of transformers: masks and
positions are made by its own inner model, to which the part's rows of the embedding stand for all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zpp_lab.config.model import ModelConfig
from zpp_lab.models.cut import (
    Parted,
    PartPieces,
    PartStart,
    check_cut,
    cut_dim,
    cut_parameters,
    scatter,
    under,
)
from zpp_lab.models.hf import build_hf, read_config
from zpp_lab.models.loss import IGNORED
from zpp_lab.models.start import Start

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def build_hf_part(cfg: ModelConfig, vocab_size: int, tp: int, part: int) -> nn.Module:
    """Build a part of the model that `cfg` names, on the meta device. ValueError where it has no
    such parts."""
    settings = read_config(cfg)
    if settings.model_type not in FAMILIES:
        raise ValueError(
            f"cluster.tp={tp} is not built for model_type={settings.model_type}: use "
            f"{', '.join(FAMILIES)}, or cluster.tp=1"
        )
    sizes = {f"options.{name}": getattr(settings, name) for name in SIZES}
    check_cut(cfg, settings.vocab_size, tp, sizes)
    model: Any = build_hf(cfg, vocab_size)
    _become_part(model, tp, part, PartModel, PartLayer)
    return model  # type: ignore[no-any-return]


def cut_hf(model: Any, tp: int, part: int) -> None:
    """Turn a whole model of transformers, with its weights, into one of its parts, in place.
    ValueError where it has none."""
    kind, settings = type(model).__name__, getattr(model, "config", None)
    ours = type(model).__module__ == build_hf.__module__
    own = ours or _of_transformers(model)
    family = getattr(settings, "model_type", "")
    if not own or family not in FAMILIES or not kind.endswith("ForCausalLM"):
        named = f"{kind} (model_type={family})" if family else kind
        raise ValueError(
            f"tp={tp} is not built for {named}: use the ForCausalLM of {', '.join(FAMILIES)}, or "
            "cut the model yourself with torch's parallelize_module and pass mesh=mesh['dp']"
        )
    if wrapped := [layer for layer in model.model.layers if not _of_transformers(layer)]:
        raise ValueError(
            f"tp={tp} is not built for layers of class {type(wrapped[0]).__name__}: wrap none"
        )
    for name in SIZES:
        if (size := getattr(settings, name)) % tp:
            raise ValueError(f"tp={tp} does not divide {name}={size}: use a divisor")
    rows = model.lm_head.weight.shape[0]
    if rows % tp:
        raise ValueError(
            f"tp={tp} does not divide the vocabulary of {rows}: call "
            f"model.resize_token_embeddings(pad_to_multiple_of={tp}) before"
        )
    kinds = (PartModel, PartLayer) if ours else (LoopModel, LoopLayer)
    _become_part(model, tp, part, *kinds)


def _of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def _become_part(model: Any, tp: int, part: int, kind: type, layer: type) -> None:
    """Cut the model's matrices, and put `kind` and `layer` before the classes of it and its
    layers."""
    for name, p in model.named_parameters():
        if (cut_dim(name) or 0) >= p.ndim:  # every part would add it
            raise ValueError(
                f"cluster.tp={tp} is not built for {name}: use attention_bias: false, mlp_bias: "
                "false (in model.options), or cluster.tp=1"
            )
    cut_parameters(model, tp, part)
    embed = model.get_input_embeddings()
    if embed.padding_idx is not None:  # whose row gets no gradient
        own = embed.padding_idx - part * embed.weight.shape[0]
        embed.padding_idx = own if 0 <= own < embed.weight.shape[0] else None
    model.tp, model.part = tp, part
    model.__class__ = under(kind, type(model))
    for _, block in model.units():
        block.__class__ = under(layer, type(block))
    model.join((model,), None)


class PartModel(Parted):
    """What a part of a causal language model has before its own class."""

    model: Any
    lm_head: nn.Linear
    turns: tuple[Tensor, Tensor]  # cosines and sines of positions

    @property
    def embed(self) -> nn.Embedding:  # type: ignore[override]
        return self.model.embed_tokens  # type: ignore[no-any-return]

    @property
    def norm(self) -> nn.Module:  # type: ignore[override]
        return self.model.norm  # type: ignore[no-any-return]

    def _head(self) -> Tensor:
        return self.lm_head.weight

    def see(self, tokens: Tensor, **given: Any) -> None:
        """Prepare a forward. ValueError where it has more tokens than the model has positions, or
        than its attention sees at once."""
        super().see(tokens, **given)
        own, length = self.model.config, tokens.shape[1]
        for key in ("max_position_embeddings", "sliding_window"):
            most = getattr(own, key, None)
            if most and length > most:
                raise ValueError(
                    f"data.seq_len={length} with {key}={most}: use at most {most}, or "
                    f"model.options={{{key}: …}}"
                )

    def enter(self, tokens: Tensor) -> list[Tensor]:
        xs = super().enter(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        self.turns = self.model.rotary_emb(xs[0], positions)
        return xs

    def start(self, seed: int) -> Start:
        return PartStart(super().start(seed), self)  # type: ignore[misc]


class PartLayer(PartPieces):
    """What a layer of a part has before its own class."""

    pieces = (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))

    def run(self, body: str, x: Tensor) -> Tensor:
        if body == "mlp":
            return super().run(body, x)
        (model,), attend = self.model, getattr(self, body)
        made: Tensor = attend(x, position_embeddings=model.turns, attention_mask=None)[0]
        return made


class LoopModel(PartModel):
    """The same in a user training loop, called as transformers' own."""

    config: Any
    loss_type: Any
    loss_function: Any

    def units(self) -> list[tuple[str, nn.Module]]:  # type: ignore[override]
        return [(f"model.layers.{i}", layer) for i, layer in enumerate(self.model.layers)]

    def see(self, tokens: Tensor, **given: Any) -> None:
        Parted.see(self, tokens, **given)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *others: Any,
        labels: Tensor | None = None,
        use_cache: bool | None = None,  # by default transformers' own: masks depend on it
        return_dict: bool | None = None,
        **more: Any,
    ) -> Any:
        """Return as transformers' forward. `logits` are whole, and None in training with labels, as
        the loss is taken in parts. ValueError for what generation and adapters ask beside."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        if others:
            raise ValueError(
                f"tp={self.tp}: the forward was given {3 + len(others)} arguments by place: give "
                "all after position_ids by name, such as labels=labels"
            )
        of_loss = {key: more.pop(key) for key in _OF_LOSS if key in more}
        self._check(input_ids, more, bool(use_cache))
        assert input_ids is not None
        self.see(
            input_ids,
            labels=labels,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{"other arguments": {**more, **of_loss}},
        )
        rows = self._embed(input_ids).view(*input_ids.shape, -1)  # the first layer sums all parts'
        hidden = self.model(
            inputs_embeds=rows,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            **more,
        )
        local = self.part_logits([hidden.last_hidden_state])
        plain = not hasattr(self, "_loss_function") and self.loss_type in (None, "ForCausalLM")
        loss = logits = None
        if labels is None or not plain or not self.training:
            logits = self.whole_logits(local)
        if labels is not None and plain:
            loss = self._loss_of(local, labels, **of_loss)
        elif labels is not None:
            vocab = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab, **of_loss)
        made = CausalLMOutputWithPast(loss=loss, logits=logits)
        return made.to_tuple() if return_dict is False else made

    def _loss_of(
        self,
        logits: list[Tensor],
        labels: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
    ) -> Tensor:
        """Compute transformers' ForCausalLMLoss from logits in parts."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.flatten().to(logits[0].device)
        self.check(targets, ignore_index)
        targets = targets.masked_fill(targets == ignore_index, IGNORED)
        total = self.scores(logits, targets)[0].sum()
        if num_items_in_batch is None:
            return total / (targets != IGNORED).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def _check(self, input_ids: Tensor | None, more: dict[str, Any], caches: bool) -> None:
        """ValueError, naming it, for what parts do not compute."""
        given = {key: more.pop(key) for key in _REFUSED if key in more}
        asked = [k for k, v in given.items() if not (v is None or (isinstance(v, int) and not v))]
        asked += [k for k in _REFUSED if k.startswith("output") and getattr(self.config, k, False)]
        asked += ["use_cache=True"] * caches + ["input_ids=None"] * (input_ids is None)
        if any(getattr(layer, "gradient_checkpointing", False) for layer in self.model.layers):
            asked.append("gradient_checkpointing")
        if wrapped := [layer for layer in self.model.layers if not isinstance(layer, PartLayer)]:
            asked.append(f"layers of class {type(wrapped[0]).__name__}")
        if asked:
            raise ValueError(
                f"tp={self.tp} is not built for {', '.join(asked)}: leave it out; {_TO_GENERATE}"
            )

    def generate(self, *_: Any, **__: Any) -> Any:
        """Refuse, by ValueError: without a cache it would run, but on multiples of `tp` tokens."""
        raise ValueError(f"tp={self.tp} is not built for generate(): {_TO_GENERATE}")

    def resize_token_embeddings(self, *_: Any, **__: Any) -> Any:
        """Refuse, by ValueError: each part has rows of the vocabulary."""
        raise ValueError(
            f"tp={self.tp}: call resize_token_embeddings before zpp_lab.shard has cut the model"
        )


_TO_GENERATE = "to generate, save the weights and load them with tp=1"
_OF_LOSS = ("shift_labels", "num_items_in_batch", "ignore_index")
_REFUSED = (
    *("past_key_values", "inputs_embeds", "logits_to_keep"),
    *("output_attentions", "output_hidden_states"),
)


class LoopLayer(PartLayer):
    """A layer of such a model; the first one gets each part's rows of the embedding."""

    def forward(self, hidden_states: Tensor, **given: Any) -> Any:  # type: ignore[override]
        (model,) = self.model
        if self is model.model.layers[0]:
            (hidden_states,) = scatter(model.exchanges, "embed", [hidden_states.flatten(0, 1)])
        self.given = given
        try:
            return super().forward(hidden_states)
        finally:
            self.given = {}

    def run(self, body: str, x: Tensor) -> Tensor:
        if body == "mlp":
            return PartPieces.run(self, body, x)
        made: Tensor = getattr(self, body)(hidden_states=x, **self.given)[0]
        return made
