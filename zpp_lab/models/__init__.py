"""Models that can be trained: the decoder, Hugging Face models, first weights, adapters.

A **start** gives the first weights, any rows of any parameter: from a seed, from safetensors, or
from a run. The **base** is what stays frozen under **adapters** (LoRA). A parameter's **class** is
its kind (attention, mlp, norm ...), found by its name.
"""

from zpp_lab.models.build import build_model
from zpp_lab.models.init import initial_value
from zpp_lab.models.llama import Llama
from zpp_lab.models.params import PARAM_CLASSES, ParamClass, param_class

__all__ = ["PARAM_CLASSES", "Llama", "ParamClass", "build_model", "initial_value", "param_class"]
