"""Layout operators: encode, decode, decode_sum, encode_sums, finish_sums."""

from zpp_lab.ops.reference import (
    decode,
    decode_sum,
    encode,
    encode_sums,
    finish_sums,
    padded_rows,
)

__all__ = ["decode", "decode_sum", "encode", "encode_sums", "finish_sums", "padded_rows"]
