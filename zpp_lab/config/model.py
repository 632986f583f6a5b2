"""Settings of the model: what it is, and where its first weights come from. No torch.

Settings of low-rank adapters on a frozen base, and of how the base is stored.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from zpp_lab.config.codec import (
    STRICT,
    AboveZero,
    CodecConfig,
    Count,
    ExemptConfig,
    NotNegative,
    Positive,
    need,
)
from zpp_lab.files import below, looks_like_folder, missing

# Embeddings and heads of the built-in decoder and of transformers: QLoRA leaves them uncompressed.
# As the default it may match in part; a list of the user's own must match name by name.
OUTER = ["*embed*", "head.*", "*lm_head*", "*wte*", "*wpe*"]


@dataclass(frozen=True, config=STRICT)
class LoraConfig:
    """y = W x + (alpha / rank) B A x with W frozen (Hu et al. 2021, arXiv:2106.09685). W is encoded
    once, when the run starts. Every rank keeps the payload of its own rows and sends that, so all
    steps see the same decoded W. Parameters that `base_exempt` matches, or all of them without
    `base_codec.bits`, are kept in train.param_dtype."""

    rank: Count = 0  # 0: no adapters, all parameters are trained
    alpha: AboveZero = 32.0
    dropout: float = 0.0  # nothing else: no run could repeat it
    targets: list[str] = field(default_factory=list)  # names or globs; []: every linear of a block
    base_codec: CodecConfig = field(default_factory=CodecConfig)
    base_exempt: ExemptConfig = field(default_factory=lambda: ExemptConfig(names=list(OUTER)))

    def __post_init__(self) -> None:
        need(self.dropout == 0, f"model.lora.dropout={self.dropout}: not repeatable; set 0")
        need(
            self.base_codec.rounding in (None, "nearest"),
            "model.lora.base_codec.rounding=stochastic: the base is encoded once, so its noise "
            "would never average out; use nearest",
        )
        need(
            self.base_codec.codec != "topk",
            "model.lora.base_codec.codec=topk would set most weights to 0; use block",
        )
        need(
            self.base_codec.codec != "block" or not self.base_codec.raw,
            "model.lora.base_codec.codec=block needs bits: set model.lora.base_codec.bits to 2, "
            "3, 4, 6 or 8, or leave codec out to keep the base uncompressed",
        )
        need(
            not self.base_codec.memory.on,
            "model.lora.base_codec.memory: the base is encoded once; leave it out",
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


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The built-in decoder, or (`hf`) any causal language model of Hugging Face's transformers.
    `hf` takes its shape from `path`, or from `options.model_type`, and ignores dim … norm_eps. The
    built-in decoder can start from a LlamaForCausalLM folder of the same shape."""

    name: Literal["llama", "hf"] = "llama"
    path: str | None = None  # a folder with config.json, or (hf) a model's name on the hub
    weights: Literal["random", "pretrained"] = "random"  # from the seed, or path's safetensors
    start: str | None = None  # a run's folder, or a checkpoint in it: its weights, a new optimizer
    start_optimizer: bool = False  # its optimizer's state too: continue that run
    init: Literal["torch", "philox"] = "torch"  # random weights; philox: each rank its rows only
    # of random weights; 1 keeps a deep model's first gradients small
    embedding_std: AboveZero = 0.02
    head_std: AboveZero = 0.02
    units: str | None = None  # hf: the ModuleList of layers; None finds it
    # hf: changes to the model's own config, such as {num_hidden_layers: 2}
    options: dict[str, Any] | None = None
    preset: str = "tiny"  # for the record; the numbers below decide
    dim: Positive = 128
    layers: Positive = 2
    heads: Positive = 4
    kv_heads: Positive = 4
    ffn: Positive = 256
    vocab_size: Count = 0  # 0 takes the tokenizer's
    tied_head: bool = False
    scalar_head: bool = False  # a score of the text in place of logits: task=reward
    rope_theta: AboveZero = 10000.0
    norm_eps: NotNegative = 1e-5
    checkpoint_activations: bool = False  # blocks run again in backward; for loss.backward() alone
    qk_norm: bool = False  # a norm of queries and keys, head by head, before they are turned
    # adds z_loss · logsumexp(logits)² a token to what is minimised, not to reported losses
    z_loss: NotNegative = 0.0
    # tokens whose logits exist at a time; 0: all. Other bits, equal everywhere
    loss_chunk: Count = 0
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        self._check_start()
        self._check_decoder()
        self._check_shape()

    def _check_start(self) -> None:
        """Where the weights come from."""
        need(
            not self.lora.on or self.weights == "pretrained" or bool(self.start),
            "model.lora adapts a trained model: set model.weights=pretrained and model.path, or "
            "model.start to a run of zpp_lab; model.lora.rank=0 trains all parameters",
        )
        need(
            self.name == "hf" or not self.path or self.weights == "pretrained",
            "model.path with the built-in decoder needs model.weights=pretrained; to read only "
            "the shape of a folder's model, use model=hf",
        )
        need(
            self.name != "hf" or bool(self.path) or "model_type" in (self.options or {}),
            "model=hf needs model.path (a folder with config.json, or a name on the hub) or "
            "model.options={model_type: ...}",
        )
        need(
            self.weights == "random" or bool(self.path),
            "model.weights=pretrained needs model.path, a folder with safetensors",
        )
        need(
            not self.start or self.weights == "random",
            "model.start and model.weights=pretrained both set the initial weights: set one",
        )
        need(
            not self.start_optimizer or (bool(self.start) and not self.lora.on),
            "model.start_optimizer loads AdamW's state: set model.start to a run that trained all "
            "parameters, and leave model.lora out",
        )

    def _check_decoder(self) -> None:
        """What only one of the built-in decoder and transformers' models has."""
        hf = self.name == "hf"
        for key in ("units", "options"):
            unset = getattr(self, key) is None
            need(hf or unset, f"model.{key}: only model=hf reads it; set that, or leave it out")
        ours = {"embedding_std": 0.02, "head_std": 0.02, "qk_norm": False, "init": "torch"}
        for key, usual in ours.items():
            need(
                not hf or getattr(self, key) == usual,
                f"model.{key}: only the built-in decoder reads it, since transformers' models "
                "have their own; leave it out",
            )
        need(
            not self.tied_head or self.head_std == 0.02,
            "model.head_std: a tied head has the embedding's weights; set model.embedding_std",
        )
        need(
            not self.scalar_head or not hf,
            f"model.scalar_head=true with model={self.name}: only the built-in decoder has it; use "
            "another model=…, which also takes a LlamaForCausalLM folder (model.path)",
        )
        need(
            not self.scalar_head or not self.lora.on,
            "model.scalar_head=true with model.lora: adapters would leave the new head frozen; set "
            "model.lora.rank=0",
        )
        need(
            not self.scalar_head or not self.z_loss,
            f"model.z_loss={self.z_loss:g}: a scalar head has no cross-entropy; leave it out",
        )
        need(
            not hf or not self.z_loss or self.loss_chunk > 0,
            "model.z_loss with model=hf needs a chunked loss: set model.loss_chunk=2048 too",
        )

    def _check_shape(self) -> None:
        need(
            self.dim % self.heads == 0 and self.dim // self.heads % 2 == 0,
            f"model.dim={self.dim}, model.heads={self.heads}: dim / heads must be an even number",
        )
        need(
            self.heads % self.kv_heads == 0,
            f"model.kv_heads={self.kv_heads} must divide model.heads={self.heads}",
        )


DOWNLOAD = "download the model first (hf download NAME --local-dir FOLDER), or correct the path"


def check_model_path(cfg: ModelConfig) -> None:
    """ValueError when `model.path` is read as a folder and holds no model."""
    if not cfg.path:
        return
    path, named = Path(cfg.path), f"model.path={cfg.path}"
    if cfg.weights == "pretrained":
        if not path.is_dir():
            raise ValueError(
                f"model.weights=pretrained reads a folder; {named}: {missing(path)}; {DOWNLOAD}"
            )
    elif path.is_file() and path.suffix == ".json":
        return  # a config by itself
    elif looks_like_folder(cfg.path) and not path.is_dir():
        raise ValueError(f"{named}: {missing(path)}; {DOWNLOAD}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(
            f"{named} has no config.json{below(path, 'config.json')}: name the folder that "
            "transformers, or zpp-lab export --to hf, has written"
        )
