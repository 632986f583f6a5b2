"""The transport between ranks of one host that read each other's memory.

A rank encodes into a **slot** of shared memory, all meet, and each pulls the rows that it needs.
`symmetric.py` alone knows torch's symmetric memory.
"""
