"""What is not training: plan it, measure it, evaluate it, export its weights.

`plan/` says bytes, memory, time and the fastest plan; `bench/` measures; `links/` emulates nodes;
`export/` writes folders for others; `doctor.py` says what the machine can do.
The command line alone imports this package.
"""
