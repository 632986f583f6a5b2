"""All ranks of a cluster in one process, with the same numerics."""
