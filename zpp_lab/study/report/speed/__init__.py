"""Measured speed: tables, figures and the page of a bench.

A speed is tokens/s of an arm over **links** of a bandwidth; a **speed-up** is over plain FSDP2.
"""
