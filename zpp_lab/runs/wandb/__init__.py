"""A run's folder as a wandb run, sent by a process of its own.

Training never waits for wandb: the **sink** reads metrics.jsonl meanwhile. `run.py` alone talks
to wandb's library.
"""
