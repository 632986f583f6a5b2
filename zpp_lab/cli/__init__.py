"""The command line: words to calls, errors to exit codes.

`main.py` parses and answers mistakes; the other files hold a kind of command each.
Only this room imports `tools`.
"""
