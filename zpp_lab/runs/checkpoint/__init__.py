"""Checkpoints of every engine in one format: written, checked and read by rows.

`index.py` says what lies where. A checkpoint is whole or absent, whatever moment a run is killed.
"""
