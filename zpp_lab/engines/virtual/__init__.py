"""All ranks of a cluster in one process, with the same numerics.

Ranks take turns over one copy of the weights, so a cluster of any size runs on one device.
"""
