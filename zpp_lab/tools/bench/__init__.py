"""Benchmarks: what kernels, collectives and steps cost on this machine.

`calibrate.py` writes the figures of a machine that `zpp-lab plan --machine` predicts with.
"""
