"""A study in wandb: a workspace and a report as code, and the study's own report as an artifact.

`spec.py` says what is on the pages, as plain JSON that needs no service; `apply.py` hands it to
wandb; `publish.py` sends report.html and its tables.
"""
