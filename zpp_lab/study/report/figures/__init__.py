"""A report's figures: rows of data and Vega-Lite charts of them.

`draw.py` says which of them a study has, and writes their pictures.
"""
