"""Collectives: what travels on a wire, and the count of it."""
