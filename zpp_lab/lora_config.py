"""Settings of low-rank adapters on a frozen base, and of how the base is stored."""

from __future__ import annotations

from dataclasses import field

from pydantic.dataclasses import dataclass

from zpp_lab.codec_config import STRICT, CodecConfig, ExemptConfig, need

# Embeddings and heads of the built-in decoder and of transformers: QLoRA leaves them as they are.
# As the default it may match in part; a list of the user's own must match name by name.
OUTER = ["*embed*", "head.*", "*lm_head*", "*wte*", "*wpe*"]


@dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """y = W x + (alpha / rank) B A x with W frozen (Hu et al. 2021, arXiv:2106.09685).

    W is encoded once, when the run starts. Every rank keeps the payload of its own rows and sends
    that, so all steps see the same decoded W. Parameters that `base_exempt` matches, or all of
    them without `base_codec.bits`, are kept in train.param_dtype.
    """

    rank: int = 0  # 0: no adapters, all parameters are trained
    alpha: float = 32.0
    dropout: float = 0.0  # nothing else: no run could repeat it
    targets: list[str] = field(default_factory=list)  # names or globs; []: every linear of a block
    base_codec: CodecConfig = field(default_factory=CodecConfig)
    base_exempt: ExemptConfig = field(default_factory=lambda: ExemptConfig(names=list(OUTER)))

    def __post_init__(self) -> None:
        need(self.rank >= 0, f"model.lora.rank={self.rank}: use 0 (no adapters) or more")
        need(self.alpha > 0, f"model.lora.alpha={self.alpha}: use more than 0")
        need(
            self.dropout == 0,
            f"model.lora.dropout={self.dropout}: dropout is refused, since no run could repeat "
            "it; set 0",
        )
        need(
            self.base_codec.rounding in (None, "nearest"),
            "model.lora.base_codec.rounding=stochastic: the base is encoded once, so its noise "
            "would never average out; use nearest",
        )
        asked = bool(self.targets) or self.base_codec != CodecConfig()
        need(
            self.rank > 0 or not asked,
            "model.lora.targets and model.lora.base_codec need adapters: set model.lora.rank",
        )

    @property
    def on(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank
