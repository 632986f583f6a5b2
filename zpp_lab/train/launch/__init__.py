"""The processes of a run: where each sits, how they start, which fell silent, how they end.

A **rank** is one process of a real run. A **launcher** starts ranks, or each finds its **place**
among those that torchrun or srun started.
"""
