"""A run's newest weights as a folder that transformers loads."""

from zpp_lab.export.model import export_hf

__all__ = ["export_hf"]
