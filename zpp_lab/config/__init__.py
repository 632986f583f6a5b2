"""Every setting as a frozen dataclass, validated when it is built. No torch.

`schema.py` has `Config` and its parts; `compose.py` makes one from conf/*.yaml and overrides.
"""
