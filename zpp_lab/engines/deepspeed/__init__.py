"""The peer: DeepSpeed's ZeRO-3 and ZeRO++ behind the same interface.

`settings.py` turns our settings into its own; what it cannot express is refused.
"""
