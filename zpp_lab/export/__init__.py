"""A run's newest weights as a folder that transformers loads, or peft."""

from zpp_lab.export.adapters import export_peft
from zpp_lab.export.model import export_hf

__all__ = ["export_hf", "export_peft"]
