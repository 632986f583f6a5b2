"""Engines run a recipe on a cluster. `base.py` says what the trainer expects of one."""
