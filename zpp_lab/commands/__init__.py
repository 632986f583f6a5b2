"""What `zpp-lab` can do: a file for each kind of command, its options and what it calls.

A command imports what it needs when it is called, so that `--help` and reports need no torch.
"""
