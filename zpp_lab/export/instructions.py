"""How to load a quantized folder so that its weights are those that training computed with.

transformers unpacks a weight in the dtype of its scales, which a `dtype=` changes first; training
in bf16 decodes in fp32 and rounds what comes out. So the way depends on both dtypes.
"""

from __future__ import annotations

_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LOAD = """```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(FOLDER)
```"""
_LOAD_IN = """```python
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype={name})
```"""
_AT_ONCE = """```python
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

at_once = CompressedTensorsConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype={name}, quantization_config=at_once)
```"""
_AFTERWARDS = """```python
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(FOLDER)
with torch.no_grad():
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64))  # unpacks the weights
for p in model.parameters():  # model.to({name}) would round the rotary frequencies too
    if p.is_floating_point():
        p.data = p.data.to({name})
```"""
_NEEDS = "This needs `pip install compressed-tensors`"
_UNPACKED = (
    f"{_NEEDS}; the weights are unpacked by the first forward. Give no other `dtype`: they would "
    "be unpacked in it, to other numbers."
)
_SCALES = (
    f"{_NEEDS}. The model was trained in {{kind}}, each weight rounded to it after decoding, and "
    "the scales are in fp32. Without a `dtype` the weights stay unrounded; `dtype={name}` alone "
    "rounds the scales in place of the weights. Both give other weights than training had."
)
_MANY = "`dequantize=True` takes one kind of group for all and fails."
_ARITHMETIC = (
    "In {kind}, transformers rounds inside norms and rotary positions where the trainer does not: "
    "with the very same weights its loss was off by 2e-5 to 4e-4 nats in models of 0.4M "
    "parameters. `zpp-lab evaluate RUN FOLDER --dtype fp32` leaves that out."
)


def instructions(dtype: str, computed_in: str, grids: int, built_in: bool) -> str:
    """Markdown. dtype: the folder's; computed_in: the run's; grids: how many kinds of packed
    weights; built_in: whether another implementation than transformers' trained the model."""
    kind = rounded_to(dtype, computed_in)
    of = {"kind": kind, "name": f"torch.{_NAMES[kind]}"}
    if not grids:
        said = [_LOAD if kind == dtype else _LOAD_IN.format(**of)]
    elif kind == dtype:
        said = [_LOAD, _UNPACKED]
    else:
        said = [(_AT_ONCE if grids == 1 else _AFTERWARDS).format(**of), _SCALES.format(**of)]
    said += [_MANY] if grids > 1 else []
    said += [_ARITHMETIC.format(**of)] if built_in and kind != "fp32" else []
    return "\n\n".join(said)


def rounded_to(dtype: str, computed_in: str) -> str:
    """What the weights of a folder in `dtype` are to be rounded to once they are unpacked: what
    the model was trained in, unless the folder's own dtype has rounded them already."""
    return computed_in if dtype == "fp32" else dtype
