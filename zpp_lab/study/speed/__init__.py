"""Measured speeds of arms: their table, and speed-ups over the strongest plain arm."""
