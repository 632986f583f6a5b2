"""What a run will send, hold and take, before it starts.

Bytes are the plan's, memory is `train/memory`'s, seconds are predicted by `cost/`, and `search/`
finds the fastest plan. Nothing is trained here.
"""
