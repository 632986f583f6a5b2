"""The processes of a run: where each sits, how they start, who fell silent, how they end."""
