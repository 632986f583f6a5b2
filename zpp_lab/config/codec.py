"""Settings of one codec, and which parameters have none: recipes and frozen bases share them."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

Rounding = Literal["nearest", "stochastic"]
Dtype = Literal["fp32", "bf16"]

BITS = (2, 3, 4, 6, 8)
BLOCK_SIZES = tuple(2**k for k in range(4, 14))  # 16 ... 8192
HADAMARD_SIZES = (16, 32, 64, 128, 256)
BLOCK_SIZE = 256  # where none is given

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def need(ok: bool, message: str) -> None:
    """ValueError with `message` unless `ok`."""
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True, config=STRICT)
class CodecConfig:
    """One wire's codec. In a recipe a wire takes a field left at None from `weights` or `grads`;
    None there is the codec's own default: codec=block, block_size=256, symmetric=true,
    rounding=nearest, scale_dtype=fp32, hadamard=0.

    `codec` is a registered name. For the built-in family `block`, `bits=None`
    means that the tensor's own bytes are sent. `sham`, a control, sends them
    with noise added, as large as the error of the block codec with the same
    settings. `options` goes to codecs of other packages as keyword arguments.
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

    def check(self) -> None:
        """ValueError for what the family `block` and its `sham` do not have, also where bits=None
        leaves it unused. Codecs of other packages check their own when they are built."""
        if self.codec == "sham":
            need(self.bits is not None, "codec=sham needs the bits of the codec whose error it has")
            need(
                self.rounding != "stochastic",
                "codec=sham has the error of rounding to nearest: leave rounding out",
            )
        if self.codec in (None, "block", "sham"):
            bits, size = self.bits, self.block_size
            size = BLOCK_SIZE if size is None else size
            check_block(8 if bits is None else bits, size, self.hadamard or 0, self.random_signs)


def check_block(bits: int, block_size: int, hadamard: int, random_signs: bool | None) -> None:
    """ValueError for settings that no codec of the family `block` has. Here, without torch, so that
    a study's last arm is looked at before its first run starts."""
    need(bits in BITS, f"bits={bits}: use one of {BITS}, or null to send as is")
    need(block_size in BLOCK_SIZES, f"block_size={block_size}: use a power of two, {BLOCK_SIZES}")
    need(
        not random_signs or hadamard > 0,
        "random_signs=true needs hadamard: set it to 16, 32, 64, 128 or 256",
    )
    need(
        hadamard <= block_size,
        f"hadamard={hadamard} is wider than block_size={block_size}: use a block at least as wide",
    )
    need(
        hadamard in (0, *HADAMARD_SIZES),
        f"hadamard={hadamard}: use 0 (off) or one of {HADAMARD_SIZES}",
    )


@dataclass(frozen=True, config=STRICT)
class ExemptConfig:
    """Parameters whose own bytes travel on every wire.

    A recipe's patterns must each match a parameter of the model; the default, by dimension alone,
    is the same for every family. Of `model.lora.base_exempt` the default lists what several
    families call their embeddings and heads, and may match in part.
    """

    max_ndim: int = 1  # norms and biases have one dimension
    names: list[str] = field(default_factory=list)  # glob patterns of whole names, such as "embed*"
    below_numel: int = 0
