"""A run's folder: written while it trains, read by everyone else.

`metrics.jsonl` is the truth about a run, one line a step; `summary.json` is written last, and
console and wandb are views of both. A **checkpoint** is a state that any engine goes on from.
**Provenance** is the machine and the commit that made the numbers.
"""
