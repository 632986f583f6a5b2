"""Measured speed: tables, figures and the page of a bench.

A speed is tokens/s of an arm over **links** of a bandwidth; a **speed-up** is over the
strongest plain FSDP2 of the same call, with the raw **twin** of the arm next to it.
"""
