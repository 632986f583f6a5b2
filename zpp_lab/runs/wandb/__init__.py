"""A run's folder as a wandb run, sent by a process of its own."""
