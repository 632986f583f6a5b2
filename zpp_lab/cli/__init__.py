"""The command line: words to calls, errors to exit codes.

`main.py` parses and answers mistakes; the other files hold a kind of command each.
A command is a subcommand of `zpp-lab`; what follows its options are **overrides** in Hydra's
grammar (`recipe=zeropp train.steps=300`), or, behind `--`, the words of another program.
Only this package imports `tools`.
"""
