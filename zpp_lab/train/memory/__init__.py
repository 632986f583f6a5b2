"""What each rank of a run will hold, in bytes, before anything is allocated.

Items are counted at the **moments** of a step (`buffers.py`); the largest sum is the peak.
"""
