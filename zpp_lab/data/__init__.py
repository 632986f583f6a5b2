"""Text as token files: corpora, tokenizers, and the windows that training reads."""

from zpp_lab.data.tokens import TokenData, open_data

__all__ = ["TokenData", "open_data"]
