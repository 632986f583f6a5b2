"""Several nodes on one host: network namespaces, joined by links of a chosen speed.

`nodes.hosts` makes them; `train/launch/ranks.py` says what a rank on them must know.
"""
