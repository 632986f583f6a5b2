"""What a training step costs in time, before it runs: `predict(config, machine, link_gbps)`."""
