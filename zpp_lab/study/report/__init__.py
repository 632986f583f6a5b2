"""A study's report: tables, figures and words, each from the judged study.

`contents.py` makes **sections** of what the runs say, and `render.py` writes them as HTML,
Markdown and LaTeX. `figures/` draws losses, `speed/` shows a bench.
"""
