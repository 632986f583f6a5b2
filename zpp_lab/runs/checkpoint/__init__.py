"""Checkpoints of every engine in one format; `index.py` says what lies where."""
