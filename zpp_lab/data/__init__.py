"""Text to tokens to batches; a batch is a pure function of seed and step.

A **corpus** lists documents, a **tokenizer** turns each into tokens, and `prepare.py` keeps them
as token files, split into `train` and `heldout`. Training reads random **windows** of them.
**Records** are finetuning examples: they are packed whole into sequences, and a mask says which
of their tokens count.
"""

from zpp_lab.data.packed import PackedData
from zpp_lab.data.tokens import TokenData, open_data

__all__ = ["PackedData", "TokenData", "open_data"]
