"""From finished runs to verdicts: statistics of paired seeds, families of tests, effects."""
