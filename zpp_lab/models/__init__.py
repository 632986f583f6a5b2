"""Models that can be trained: the built-in decoder, Hugging Face's, and names of parameters."""

from zpp_lab.models.build import build_model
from zpp_lab.models.init import initial_value
from zpp_lab.models.llama import Llama
from zpp_lab.models.params import PARAM_CLASSES, ParamClass, param_class

__all__ = ["PARAM_CLASSES", "Llama", "ParamClass", "build_model", "initial_value", "param_class"]
