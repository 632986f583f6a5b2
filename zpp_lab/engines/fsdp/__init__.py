"""One process a rank: FSDP2 with the recipe's collectives.

Only this folder knows FSDP2's insides. FSDP2 stays untouched: its units get an AllGather and a
ReduceScatter of ours (`comm.py`), which hand it **packed** buffers in place of tensors.
"""
