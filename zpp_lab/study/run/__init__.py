"""The runs of a study: planned, queued, placed, started and shown."""
