"""Layout operators: whole parameters to payload rows and back, on CUDA kernels or plain torch.

Tensors decide: CUDA tensors take the kernels of cuda/, everything else reference.py. Both give
the same bits, and reference.py says what each operator takes and gives. `configure` forces one of
them; `status` says what serves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from torch import Tensor

from zpp_lab.codecs.kernels import cuda, reference
from zpp_lab.codecs.kernels.backend import configure, status, use_kernels
from zpp_lab.codecs.kernels.reference import padded_rows

__all__ = [
    "configure",
    "decode",
    "decode_sum",
    "decode_sum_encode",
    "encode",
    "encode_sums",
    "encode_update",
    "finish_sums",
    "padded_rows",
    "reduce",
    "status",
]

P = ParamSpec("P")
T = TypeVar("T")


def _served(name: str, plain: Callable[P, T], kernel: Callable[P, T]) -> Callable[P, T]:
    """Choose between `plain` and `kernel` in each call, by the tensor argument called `name`."""
    # looked up once, as a search in each call takes the host time
    at = [*signature(plain).parameters].index(name)

    @wraps(plain)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        tensor = args[at]
        assert isinstance(tensor, Tensor)
        return (kernel if use_kernels(tensor) else plain)(*args, **kwargs)

    return call


encode = _served("out", reference.encode, cuda.encode)
encode_update = _served("out", reference.encode_update, cuda.encode_update)
decode = _served("payload", reference.decode, cuda.decode)
decode_sum = _served("payload", reference.decode_sum, cuda.decode_sum)
reduce = _served("payload", reference.reduce, cuda.reduce)
encode_sums = _served("sums", reference.encode_sums, cuda.encode_sums)
finish_sums = _served("sums", reference.finish_sums, cuda.finish_sums)
decode_sum_encode = _served("payload", reference.decode_sum_encode, cuda.decode_sum_encode)
