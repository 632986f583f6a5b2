"""A run's folder: written while it trains, read by everyone else.

`metrics.jsonl` is the truth about a run, `summary.json` is written last, and console and wandb
are views of both.
"""
