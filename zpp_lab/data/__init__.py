"""Text as token files: corpora, tokenizers, and the windows that training reads."""

from zpp_lab.data.packed import PackedData
from zpp_lab.data.tokens import TokenData, open_data

__all__ = ["PackedData", "TokenData", "open_data"]
