"""What the built-in decoder keeps for its backward, and what that backward holds, in closed form.

Counted from what autograd saves in `models/llama.py` with a fused attention that keeps queries,
keys, values, output and one fp32 number a head (flash attention), and a fused RMSNorm that keeps
its input and one fp32 number. In elements a token, d = dim, f = ffn, k = keys of one head group:

    attention  block input, its norm, attention's output: 3 d; q, k, v: d + 2 k;
               with qk_norm what goes into the norms of q and k too: d + k
    MLP        its norm's input and output: 2 d; gate, silu(gate), up, their product: 4 f

torch.compile computes silu(gate) again, and of the MLP's input keeps the part that attention adds:
5 d + d + 2 k + 3 f. Its partition does not depend on the shapes (the tests count both).

With tensor parts a rank has a slice of the tokens and all features, or all tokens and its part of
the features: as many elements. Of other parts' tokens it keeps both norms' outputs too. Compiled
parts keep 3 f for their MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zpp_lab.codecs import RawCodec
from zpp_lab.collectives.acts import acts_layout
from zpp_lab.collectives.plan import Plan
from zpp_lab.config.model import ModelConfig
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import ACTS_BACKWARD, ACTS_FORWARD

FP32 = 4


class Slices(NamedTuple):
    """Bytes that a tensor part gives every other one at a place, forward and backward."""

    tp: int = 1
    forward: int = 0
    backward: int = 0

    @classmethod
    def of(cls, plan: Plan, tokens: int, coded: bool = True) -> Slices:
        """Count the plan's with so many tokens; uncompressed, as evaluation sends them, if not
        `coded`."""
        if plan.parts is None:
            return cls()
        recipe, numel = plan.recipe, tokens * plan.parts.dim // plan.parts.tp
        raw = RawCodec(recipe.weights_dtype)
        codecs = [recipe.acts_codec(w) if coded else raw for w in (ACTS_FORWARD, ACTS_BACKWARD)]
        return cls(plan.parts.tp, *(acts_layout("", numel, codec).nbytes for codec in codecs))


WHOLE = Slices()


@dataclass(frozen=True)
class Activations:
    """Bytes that one rank's forward of `tokens` tokens, its slice of them with tensor parts, keeps,
    and its temporaries."""

    model: ModelConfig
    vocab: int
    tokens: int
    itemsize: int  # bytes of param_dtype
    compiled: bool = False
    adapters: int = 0  # elements a token between the adapters' two products, of one block
    head_trained: bool = True
    slices: Slices = WHOLE

    @classmethod
    def of(cls, config: Config, vocab: int) -> Activations:
        tokens = config.train.batch_size * config.data.seq_len
        itemsize = 2 if config.train.param_dtype == "bf16" else FP32
        return cls(config.model, vocab, tokens, itemsize, config.engine.compile)

    @property
    def _keys(self) -> int:
        return self.model.kv_heads * (self.model.dim // self.model.heads)

    @property
    def block(self) -> int:
        """Of one block, its input included."""
        m = self.model
        wide = 6 * m.dim + 2 * self._keys + (3 if self.compiled else 4) * m.ffn + self.adapters
        wide += m.qk_norm * (m.dim + self._keys)
        single = m.heads + 2 + m.qk_norm * (m.heads + m.kv_heads)
        return self.tokens * (self.itemsize * wide + FP32 * single) + 2 * self._others

    @property
    def between(self) -> int:
        """Of one block from its forward to its backward."""
        return self.row if self.model.checkpoint_activations else self.block

    @property
    def kept(self) -> int:
        """Of all blocks from forward to backward, and of the last norm."""
        last = 2 * self.row + self._others + FP32 * self.tokens
        return self.model.layers * self.between + last

    @property
    def recomputed(self) -> int:
        """Of the one block that backward computes again, beyond its input."""
        return self.block - self.between

    def backward(self, grads: int) -> int:
        """Return the most that a block's backward holds beyond what the block kept: incoming and
        flowing gradients and its parameters' own (`grads` bytes), less what has gone by then."""
        mlp, attention = self._own(grads)
        whole = self.compiled and self.slices.tp == 1
        parts = self._compiled_flow if whole else self._eager_flow
        return self.row + max(0, *parts(mlp, attention))

    def _own(self, grads: int) -> tuple[int, int]:
        """Return the bytes of the gradient of one matrix of the MLP, and of the query's matrix."""
        m = self.model
        whole = 3 * m.ffn + 2 * m.dim + 2 * self._keys
        return grads * m.ffn // whole, grads * m.dim // whole

    def _eager_flow(self, mlp: int, query: int) -> tuple[int, ...]:
        """Return what flows at each moment: two gradients of the product's factors while silu(gate)
        is there; the last matrix of the MLP; q's, k's and v's gradients next to the output's; q's
        turned back in fp32, before and after; all matrices. With tensor parts also what travels: in
        the forward, then into and out of the MLP and out of the attention, whose keys' and values'
        parts are added before. Compiled parts keep no silu(gate); here they hold it all the same.
        """
        d, f, k = self.row, self._rows(self.model.ffn), self._rows(self._keys)
        kept = (3 if self.compiled else 4) * f
        every, key = d + self._others, query * self._keys // self.model.dim
        after = 3 * mlp - kept - self._others
        matrices = after + 2 * query + 2 * key - d - 2 * k
        moments = (
            mlp + 2 * f,
            3 * mlp - kept + f + 2 * every,
            after + query + d + 2 * k,
            after + query + 2 * key + 2 * FP32 * self.tokens * self.model.dim - d - 2 * k,
        )
        tp, ahead, back = self.slices
        if tp == 1:
            return (*moments, matrices + 2 * d)
        return (
            *moments,
            every + 2 * tp * ahead + d,
            every + max(tp * back, f + mlp),
            3 * mlp - kept + 2 * tp * back + d,
            after + query + 2 * key + 3 * every - 2 * d - 2 * k,
            matrices + 2 * max(every, tp * back) - d,
        )

    def _compiled_flow(self, mlp: int, query: int) -> tuple[int, ...]:
        """Return the same in the order of Inductor's code, without silu(gate); attention's four
        matrices come last."""
        d, f, k = self.row, self._rows(self.model.ffn), self._rows(self._keys)
        key = query * self._keys // self.model.dim
        after = 3 * mlp - 3 * f
        return (
            mlp + f,
            3 * mlp - 2 * f + d,
            after + 4 * d + 2 * k,
            after + 4 * d + 2 * FP32 * self.tokens * self.model.dim,
            after + 2 * query + 2 * key - d,
        )

    @property
    def loss(self) -> int:
        """Logits and what a loss makes of them, at the largest.

        Whole logits of fp32: log-probabilities, their gradient and the logits' gradient. Of bf16 on
        a GPU: the logits, the same in fp32 and the log-probabilities, as backward is one kernel
        (`models/fused.py`; a vocabulary whose order of adding that knows takes less). In chunks:
        one chunk's logits and its fp32 softmax, and the head's gradient; of several chunks that is
        a sum in fp32 and a part to add. A scalar head: its inputs in fp32 and their gradient.
        A vocabulary in parts: the logits, the same in fp32 and what that becomes, or where targets
        are.
        """
        chunk = self._chunk
        if self.model.scalar_head:
            return self._scored + FP32 * self.tokens * self.model.dim
        if self.slices.tp > 1:
            each = 2 * FP32 + (1 if self.itemsize == FP32 else self.itemsize)
            return each * self.tokens * self.vocab
        if not chunk:
            large = self.tokens * self.vocab >= 2**31  # for that kernel
            each = 3 * FP32 if self.itemsize == FP32 or large else self.itemsize + 2 * FP32
            return each * self.tokens * self.vocab
        at_once = (self.itemsize + FP32) * min(chunk, self.tokens) * self.vocab
        head = (FP32 * (chunk < self.tokens) + self.itemsize) * self.head
        return at_once + head + self.row

    @property
    def passing(self) -> int:
        """The most of a block that runs without gradients, its input included: where queries or
        keys are turned in fp32, before and after; attention and its product; the MLP's product;
        what tensor parts exchange."""
        d, f, k = self.row, self._rows(self.model.ffn), self._rows(self._keys)
        wide = 2 * FP32 * self.tokens
        turned = max(wide * self.model.dim, k + wide * self._keys)
        own, every = max(turned, 2 * d + 2 * k, 3 * f), d + self._others
        return 3 * d + own if every == d else 3 * d + every + max(own, 3 * every + d)

    @property
    def heldout_loss(self) -> int:
        """Logits and what token losses make of them, without gradients."""
        chunk = self._chunk
        if self.model.scalar_head:
            return self.row + self._scored
        each = self.itemsize + FP32 if chunk or self.itemsize == FP32 else self.itemsize + 2 * FP32
        rows = min(chunk or self.tokens, self.tokens)
        return self.row + self._others + each * rows * self.vocab

    @property
    def _scored(self) -> int:
        """Of a scalar head's inputs in fp32."""
        return FP32 * self.tokens * self.model.dim if self.itemsize < FP32 else 0

    @property
    def _chunk(self) -> int:
        """Tokens whose logits exist at a time; 0: all, by torch's own loss."""
        return self.model.loss_chunk or (self.tokens if self.model.z_loss else 0)

    @property
    def head(self) -> int:
        """Elements of the head that are trained."""
        rows = 1 if self.model.scalar_head else self.vocab
        return rows * self.model.dim // self.slices.tp if self.head_trained else 0

    @property
    def tied(self) -> bool:
        return self.model.tied_head

    @property
    def row(self) -> int:
        """Of the residual stream."""
        return self._rows(self.model.dim)

    @property
    def _others(self) -> int:
        """Of the residual stream in other parts' slices."""
        return (self.slices.tp - 1) * self.row

    def _rows(self, width: int) -> int:
        return self.tokens * width * self.itemsize


def cached_width(model: ModelConfig) -> int:
    """Return the elements of keys and values of one token in all layers."""
    if model.name == "hf":
        from zpp_lab.models.hf import read_config  # imports transformers' parts

        own = read_config(model).get_text_config()
        heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
        each = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        return int(2 * own.num_hidden_layers * heads * each)
    return 2 * model.layers * model.kv_heads * (model.dim // model.heads)
