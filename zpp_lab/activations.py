"""What the built-in decoder keeps for its backward, in closed form.

Counted per token from what autograd saves in `models/llama.py` with a fused attention that keeps
queries, keys, values, output and one fp32 number a head (flash attention), and a fused RMSNorm
that keeps its input and one fp32 number:

    attention  block input, its norm, q, k, v, attention's output
    MLP        input, its norm, gate, silu(gate), up, their product

torch.compile keeps less: it computes norms, silu and products again in backward. Which it saves is
its own choice, so that count is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from zpp_lab.config import Config, ModelConfig

FP32 = 4


@dataclass(frozen=True)
class Activations:
    """Bytes that one rank's forward of `tokens` tokens keeps, and what computes beside them."""

    model: ModelConfig
    vocab: int
    tokens: int
    itemsize: int  # bytes of param_dtype
    compiled: bool = False
    adapters: int = 0  # elements a token between the adapters' two products, of one block
    head_trained: bool = True

    @classmethod
    def of(cls, config: Config, vocab: int) -> Activations:
        tokens = config.train.batch_size * config.data.seq_len
        itemsize = 2 if config.train.param_dtype == "bf16" else FP32
        return cls(config.model, vocab, tokens, itemsize, config.engine.compile)

    @property
    def block(self) -> int:
        """Of one block, its input included."""
        m = self.model
        keys = 2 * m.kv_heads * (m.dim // m.heads)
        wide = 4 * m.dim + keys + 2 * m.ffn if self.compiled else 6 * m.dim + keys + 4 * m.ffn
        wide += self.adapters
        return self.tokens * (self.itemsize * wide + FP32 * (m.heads + 2))

    @property
    def kept(self) -> int:
        """Of all blocks from forward to backward, and of the last norm."""
        each = self._rows(self.model.dim) if self.model.checkpoint_activations else self.block
        return self.model.layers * each + 2 * self._rows(self.model.dim) + FP32 * self.tokens

    @property
    def recomputed(self) -> int:
        """Of the one block that backward computes again, beyond its input."""
        if not self.model.checkpoint_activations:
            return 0
        return self.block - self._rows(self.model.dim)

    @property
    def temporaries(self) -> int:
        """Gradients alive at once in a block's backward: of silu(gate), up and gate in the MLP,
        and of the two branches of the residual stream."""
        return self._rows(3 * self.model.ffn + 2 * self.model.dim)

    @property
    def loss(self) -> int:
        """Logits and what a loss makes of them, at the largest: in backward.

        Whole logits: log-probabilities, their gradient and the logits' gradient, all fp32. In
        chunks: one chunk's logits and its fp32 softmax, the head's fp32 gradient and a part to add.
        """
        m, chunk = self.model, self.model.loss_chunk
        if not chunk:
            return 3 * FP32 * self.tokens * self.vocab
        at_once = (self.itemsize + FP32) * min(chunk, self.tokens) * self.vocab
        head = (FP32 + self.itemsize) * self.vocab * m.dim if self.head_trained else 0
        return at_once + head + self._rows(m.dim)

    def _rows(self, width: int) -> int:
        return self.tokens * width * self.itemsize
