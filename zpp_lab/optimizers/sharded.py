"""Which tensors are DTensors, asked without importing their module, which takes a second.

Where nobody has imported it there are none, as in the virtual engine and in `zpp-lab plan`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(t: Any) -> TypeGuard[DTensor]:
    """Whether `t` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Any) -> Tensor:
    """What this rank has of `t`, a tensor."""
    return t.to_local() if is_sharded(t) else t
