"""Measured speed: tables, figures and the page of a bench."""
