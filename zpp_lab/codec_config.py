"""Settings of one codec, and which parameters have none: recipes and frozen bases share them."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

Rounding = Literal["nearest", "stochastic"]
Dtype = Literal["fp32", "bf16"]

STRICT = ConfigDict(extra="forbid")


def need(ok: bool, message: str) -> None:
    """ValueError with `message` unless `ok`."""
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True, config=STRICT)
class CodecConfig:
    """One wire's codec. In a recipe a field left at None is inherited.

    `codec` is a registered name. For the built-in family `block`, `bits=None`
    means that the tensor's own bytes are sent. `options` goes to codecs of
    other packages as keyword arguments.
    """

    codec: str | None = None
    bits: int | None = None
    block_size: int | None = None
    symmetric: bool | None = None
    rounding: Rounding | None = None
    scale_dtype: Dtype | None = None
    hadamard: int | None = None
    random_signs: bool | None = None
    options: dict[str, Any] | None = None

    def over(self, base: CodecConfig) -> CodecConfig:
        """These settings, with `base` where one is None."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return CodecConfig(**{k: getattr(base, k) if v is None else v for k, v in own.items()})


@dataclass(frozen=True, config=STRICT)
class ExemptConfig:
    """Parameters whose own bytes travel on every wire."""

    max_ndim: int = 1  # norms and biases have one dimension
    names: list[str] = field(default_factory=list)  # glob patterns, such as "embed*"
    below_numel: int = 0
