"""The start from a run of our own: its weights by rows, whichever engine and cluster wrote them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from zpp_lab.checkpoint.read import open_saved


class RunStart:
    """Weights of a run's newest checkpoint, or of the checkpoint that `path` is.

    ValueError lists every weight that is missing, left over, or of another shape.
    """

    def __init__(self, model: nn.Module, path: Path) -> None:
        try:
            self.saved = open_saved(path)
        except ValueError as error:
            raise ValueError(f"model.start={path}: {error}") from None
        here = {n: tuple(p.shape) for n, p in model.named_parameters()}
        there = self.saved.shapes
        wrong = [
            f"{n} {list(there[n])}, not {list(here[n])}"
            for n in sorted(set(here) & set(there))
            if here[n] != there[n]
        ]
        faults = {
            "missing": sorted(set(here) - set(there)),
            "not in the model": sorted(set(there) - set(here)),
            "of another shape": wrong,
        }
        said = [f"{len(n)} weights {what}: {', '.join(n)}" for what, n in faults.items() if n]
        if said:
            raise ValueError(
                f"model.start={path} is of another model: {'; '.join(said)}. Give model.… and "
                "data.tokenizer as that run's config.yaml has them"
            )

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return self.saved.rows(name, first, last)

    def buffer(self, name: str) -> Tensor | None:
        return None
