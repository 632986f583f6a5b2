"""A run's newest weights as a folder that transformers loads, whole or quantized, or peft.

Quantized weights are by default the very numbers that the **wire** brought in training.
"""

from zpp_lab.tools.export.model import export_hf, export_peft
from zpp_lab.tools.export.quantized import export_quantized

__all__ = ["export_hf", "export_peft", "export_quantized"]
