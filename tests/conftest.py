"""The same tests on every machine and at every run: nothing of them is drawn, or timed."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A slow machine is no fault, and what is drawn must not differ between two runs of one commit.
# `pytest --hypothesis-profile=default` looks further.
settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
