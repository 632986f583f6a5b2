"""The start of a Hugging Face model: random from a seed, or from a folder of safetensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.models.init import name_key
from zpp_lab.models.start import Start, WeightFiles

_TABLE = r"rotary_emb\.inv_freq$"  # older files hold it; models compute it


class RandomStart(Start):
    """transformers' own rule for each parameter, drawn from a seed of its own: a pure function of
    (seed, name, shape), whatever is built before it or on which rank."""

    def __init__(self, twin: nn.Module, seed: int) -> None:
        """`twin`: the model with parameters on the meta device, as transformers made it."""
        self.twin, self.seed = twin, seed

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return self._whole(name)[first:last]

    @torch.no_grad()
    def _whole(self, name: str) -> Tensor:
        """Apply the rule of the module that owns a parameter, then those of the modules around that
        one, which may change it (GPT-2 scales projections into the residual stream)."""
        path, _, attribute = name.rpartition(".")
        owner = self.twin.get_submodule(path)
        kept = owner._parameters[attribute]
        assert kept is not None
        value = nn.Parameter(torch.full(kept.shape, torch.nan), kept.requires_grad)
        owner._parameters[attribute] = value
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(name_key(self.seed, name) >> 1)
                for module, rule in self._around(path):
                    rule(module)
        finally:
            owner._parameters[attribute] = kept
        if bool(value.isnan().any()):
            raise ValueError(f"cannot initialise {name}: start from model.weights=pretrained")
        return value.detach()

    def _around(self, path: str) -> list[tuple[nn.Module, Any]]:
        """Return the module at `path` and those around it, each with its model's rule."""
        parts = path.split(".") if path else []
        chain: list[nn.Module] = [self.twin]
        for part in parts:
            chain.append(chain[-1].get_submodule(part))
        found, rule = [], None
        for module in chain:
            rule = getattr(module, "_init_weights", rule)
            found.append((module, rule))
        return found[::-1]


class SavedStart(Start):
    """Weights of a folder as `save_pretrained` writes it, in one file or several. Rows are read
    straight from the file. ValueError lists every tensor that is missing, left over, or of another
    shape."""

    def __init__(self, folder: Path, twin: nn.Module) -> None:
        self.stored = WeightFiles(folder)
        self.names = self._match(twin)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        parts = [self.stored.rows(saved, first, last) for saved in self.names[name]]
        if any(not torch.equal(parts[0], part) for part in parts[1:]):
            raise ValueError(
                f"{self.stored.folder}: {' and '.join(self.names[name])} are one parameter in this "
                "model, but differ; set model.options={tie_word_embeddings: false}"
            )
        return parts[0]

    def buffer(self, name: str) -> Tensor | None:
        return self.stored.whole(self.names[name][0]) if name in self.names else None

    def _match(self, twin: nn.Module) -> dict[str, list[str]]:
        """Map each parameter's and buffer's name to its names in the files (two when tied)."""
        first = {id(p): n for n, p in twin.named_parameters()}
        # every name that a checkpoint may use, with the parameter's or saved buffer's first one
        wanted = {n: first.get(id(t), n) for n, t in twin.state_dict(keep_vars=True).items()}
        saved = _in_model(self.stored.files, twin, wanted)
        found: dict[str, list[str]] = defaultdict(list)
        for n, own in saved.items():
            if own is not None:
                found[own].append(n)
        shapes = {n: t.shape for n, t in twin.state_dict().items()}
        ignored = (*(getattr(twin, "_keys_to_ignore_on_load_unexpected", None) or ()), _TABLE)
        self.stored.check(
            {own: shapes[own] for own in wanted.values() if own not in found}
            | {n: shapes[own] for n, own in saved.items() if own is not None},
            {
                n: self.stored.shape(n)
                for n, own in saved.items()
                if own is not None or not any(re.search(pattern, n) for pattern in ignored)
            },
        )
        return dict(found)


def _in_model(saved: Iterable[str], twin: Any, wanted: dict[str, str]) -> dict[str, str | None]:
    """Map each saved tensor to the model's name, None where it has none. transformers knows older
    names, and that a bare base model is saved without its prefix. Tensors that it would stack or
    split stay unknown: rows of those cannot be read."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [t for t in get_model_conversion_mapping(twin) if isinstance(t, WeightRenaming)]

    def own(name: str) -> str | None:
        named, _ = rename_source_key(name, renamings, [], twin.base_model_prefix, wanted)
        return wanted.get(named)

    return {name: own(name) for name in saved}
