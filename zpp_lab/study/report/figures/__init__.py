"""A report's figures: rows of data and Vega-Lite charts of them."""
