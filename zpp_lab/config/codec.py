"""Settings of one codec, and which parameters have none: recipes and frozen bases share them."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Rounding = Literal["nearest", "stochastic"]
Dtype = Literal["fp32", "bf16"]
MemoryStore = Literal["fp32", "bf16", "8bit"]

BITS = (2, 3, 4, 6, 8)
NORMAL_BITS = (2, 3, 4)
BLOCK_SIZES = tuple(2**k for k in range(4, 14))  # 16 ... 8192
CHUNK_SIZES = tuple(2**k for k in range(4, 17))  # 16 ... 65536, of topk
HADAMARD_SIZES = (16, 32, 64, 128, 256)
BLOCK_SIZE = 256  # where none is given
BUILT_IN = ("block", "normal", "sham", "sign", "topk")  # no package's of its own
# of codes, where none is given
_CODES = {"symmetric": True, "rounding": "nearest", "scale_dtype": "fp32"}

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]


def need(ok: bool, message: str) -> None:
    """Raise ValueError with `message` unless `ok`."""
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True, config=STRICT)
class MemoryConfig:
    """Settings of a gradient wire's error-feedback residual; `codecs/kernels/memory.py` has the
    arithmetic. A field at None is taken from `base` as in `CodecConfig`; the final defaults are
    kind=none, store=bf16, decay=1, average=0, reset_every=0 (never)."""

    kind: Literal["none", "residual"] | None = None
    store: MemoryStore | None = None
    decay: Annotated[float, Field(gt=0, le=1)] | None = None  # of what is remembered
    # share of the old memory in the new one, a moving average
    average: Annotated[float, Field(ge=0, lt=1)] | None = None
    reset_every: Count | None = None  # steps after which it is forgotten

    @property
    def on(self) -> bool:
        return self.kind not in (None, "none")

    def over(self, base: MemoryConfig) -> MemoryConfig:
        """Return these settings, with those of `base` where one is None."""
        return MemoryConfig(**_over(self, base))

    def check(self) -> None:
        """ValueError for settings of a residual that is not asked for."""
        given = " and ".join(f"memory.{k}" for k, v in vars(self).items() if v is not None)
        need(
            self.kind is not None or not given,
            f"{given}: no residual is set: set memory.kind=residual, or leave it out",
        )


@dataclass(frozen=True, config=STRICT)
class CodecConfig:
    """One wire's codec.

    In a recipe a wire takes a field left at None from `weights` or `grads`; None there is the
    codec's own default: codec=block, block_size=256, symmetric=true, rounding=nearest,
    scale_dtype=fp32, hadamard=0.

    `codec` is a registered name. Without one, `bits=None` sends the tensor's own bytes. `sham`, a
    noise control, sends them with noise as large as the error of the block codec with the same
    settings. `normal` is `block` with levels for normal numbers. `topk` sends the `keep` greatest
    elements of each `block_size`, quantized to `bits` or uncompressed. `options` goes to codecs of
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
    keep: int | None = None
    options: dict[str, Any] | None = None
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def over(self, base: CodecConfig) -> CodecConfig:
        """Return these settings over those of `base`, of which another codec takes no `keep`."""
        merged = _over(self, base)
        if self.codec not in (None, base.codec):
            merged["keep"] = self.keep
        return CodecConfig(**merged | {"memory": self.memory.over(base.memory)})

    def resolved(self) -> dict[str, Any]:
        """Return what is sent: the codec and every setting that it reads, defaults written out."""
        if self.raw:
            return {"codec": "none"}
        own = {name: value for name, value in vars(self).items() if name != "memory"}
        own["codec"] = self.codec or "block"
        usual: dict[str, Any] = {"block_size": BLOCK_SIZE} if own["codec"] in BUILT_IN else {}
        if own["codec"] in ("block", "sham"):
            usual |= {**_CODES, "hadamard": 0, "random_signs": False}
        elif own["codec"] == "normal":
            usual |= {"scale_dtype": "fp32", "hadamard": 0, "random_signs": False}
        elif own["codec"] == "topk" and self.bits is not None:
            usual |= _CODES
        found = usual | {name: value for name, value in own.items() if value is not None}
        found = {name: found[name] for name in own if name in found}
        if self.memory.on:
            given = {k: v for k, v in vars(self.memory).items() if v is not None}
            usual = {"kind": None, "store": "bf16", "decay": 1.0, "average": 0.0, "reset_every": 0}
            found["memory"] = usual | given
        return found

    @property
    def raw(self) -> bool:
        """Whether the tensor's own bytes are sent uncompressed."""
        return self.codec == "none" or (self.codec in (None, "block") and self.bits is None)

    def check(self) -> None:
        """ValueError for what `topk`, the family `block` and its kin do not have, also where
        bits=None leaves it unused. Codecs of other packages check their own when they are built."""
        self.memory.check()
        if self.codec == "topk":
            self._check_topk()
        need(
            self.keep is None or self.codec not in (None, "none", "block", "normal", "sham"),
            f"keep={self.keep}: only codec=topk reads it; set codec=topk, or leave keep out",
        )
        if self.codec == "sham":
            need(self.bits is not None, "codec=sham needs bits, those of the codec it imitates")
            nearest = self.rounding != "stochastic"
            need(nearest, "codec=sham imitates rounding to nearest: leave rounding out")
        if self.codec == "normal":
            need(self.bits is not None, "codec=normal needs bits: set 2, 3 or 4")
            symmetric = self.symmetric is None or self.symmetric
            check_normal(self.bits or 0, symmetric, self.rounding or "nearest")
        if self.codec in (None, "block", "normal", "sham"):
            bits, size = self.bits, self.block_size
            size = BLOCK_SIZE if size is None else size
            check_block(8 if bits is None else bits, size, self.hadamard or 0, self.random_signs)

    def _check_topk(self) -> None:
        need(self.keep is not None, "codec=topk needs keep, elements sent of a block: set keep=8")
        size = BLOCK_SIZE if self.block_size is None else self.block_size
        check_topk(self.keep or 0, size, self.bits)
        need(
            not self.hadamard and not self.random_signs,
            "codec=topk with hadamard: a rotation evens out the elements, so none is worth "
            "selecting; set hadamard=0 and leave random_signs out",
        )
        given = [name for name in _CODES if getattr(self, name) is not None]
        need(
            self.bits is not None or not given,
            f"codec=topk with {' and '.join(given)}, but without bits the selected "
            "elements are sent uncompressed: set bits, or leave that out",
        )


def _over(own: Any, base: Any) -> dict[str, Any]:
    """Return the settings of `own`, with those of `base` where one is None."""
    return {k: getattr(base, k) if v is None else v for k, v in vars(own).items()}


def check_block(bits: int, block_size: int, hadamard: int, random_signs: bool | None) -> None:
    """ValueError for settings that no codec of the family `block` has. It needs no torch, so a
    study's last arm is checked before its first run starts."""
    need(bits in BITS, f"bits={bits}: use one of {BITS}, or null to send uncompressed")
    need(block_size in BLOCK_SIZES, f"block_size={block_size}: use a power of two, {BLOCK_SIZES}")
    sizes, wide = HADAMARD_SIZES, f"hadamard={hadamard}"
    need(not random_signs or hadamard > 0, f"random_signs=true needs hadamard: use one of {sizes}")
    over = f"{wide} above block_size={block_size}: use a block at least as wide"
    need(hadamard <= block_size, over)
    need(hadamard in (0, *sizes), f"{wide}: use 0 (off) or one of {sizes}")


def check_normal(bits: int, symmetric: bool, rounding: str) -> None:
    """ValueError for what `normal`, beyond the settings of `block`, does not have."""
    need(bits in NORMAL_BITS, f"codec=normal, bits={bits}: use 2, 3 or 4, or codec=block")
    need(symmetric, "codec=normal, symmetric=false: set symmetric=true, or use codec=block")
    need(rounding == "nearest", f"codec=normal, rounding={rounding}: set rounding=nearest")


def check_topk(keep: int, block_size: int, bits: int | None) -> None:
    """ValueError for settings that `topk` does not have. `bits`: of its values."""
    need(
        block_size in CHUNK_SIZES,
        f"codec=topk, block_size={block_size}: use a power of two, {CHUNK_SIZES}",
    )
    need(
        1 <= keep <= block_size,
        f"keep={keep} of each block_size={block_size}: use 1 to {block_size}, or larger blocks",
    )
    need(bits in (None, *BITS), f"bits={bits}: use one of {BITS}, or null to send uncompressed")
    need(
        bits is None or keep in BLOCK_SIZES,
        f"keep={keep} with bits={bits}: the selected elements of a block share a scale, so use a "
        f"power of two, {BLOCK_SIZES}, or bits=null",
    )


@dataclass(frozen=True, config=STRICT)
class ExemptConfig:
    """Parameters whose own bytes travel on every wire. A recipe's patterns must each match a
    parameter of the model; the default, by dimension alone, is the same for every family. The
    default of `model.lora.base_exempt` lists what several families call their embeddings and heads,
    and may match in part."""

    max_ndim: int = 1  # norms and biases have one dimension
    names: list[str] = field(default_factory=list)  # glob patterns of whole names, such as "embed*"
    below_numel: int = 0
