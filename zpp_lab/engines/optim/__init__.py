"""AdamW on the shards of DTensors, and AdamW whose moments take two or one byte an element.

**States** are an optimizer's two moments; they may lie in host memory. The update is defined in
plain torch, and a kernel does it on the GPU with the same bits.
"""

from zpp_lab.engines.optim.adamw import BATCH, SCRATCH, SPLITTING, CompactAdamW
from zpp_lab.engines.optim.shards import ShardAdamW
from zpp_lab.engines.optim.states import DTYPES, StateKind, kind_of, state_bytes

__all__ = [
    "BATCH",
    "DTYPES",
    "SCRATCH",
    "SPLITTING",
    "CompactAdamW",
    "ShardAdamW",
    "StateKind",
    "kind_of",
    "state_bytes",
]
