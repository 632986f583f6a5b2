"""A record as wandb gets it: flat names and histograms."""

from __future__ import annotations

import math

import wandb

from zpp_lab.runs.wandb.identity import flat, row


def test_nested_names_are_joined() -> None:
    assert dict(flat({"loss": 1.0, "bytes": {"weights": {"intra": 3}}}, "final/")) == {
        "final/loss": 1.0,
        "final/bytes/weights/intra": 3,
    }


def test_counted_values_become_a_histogram() -> None:
    counts, edges = [1, 0, 5], [-3.0, -2.0, -1.0, 0.0]
    values = row(
        {"telemetry": {"grads_intra": {"mlp": {"error": {"counts": counts, "edges": edges}}}}}
    )
    histogram = values["telemetry/grads_intra/mlp/error"]
    assert isinstance(histogram, wandb.Histogram)
    assert (list(histogram.histogram), list(histogram.bins)) == (counts, edges)


def test_a_wires_errors_are_spread_over_parameter_classes() -> None:
    kinds = {"mlp": {"nmse": 1e-2}, "attention": {"nmse": 1e-4}, "norm": {"nmse": 0.0}}
    values = row({"step": 1, "telemetry": {"weights_forward": kinds, "grads_inter": {"mlp": {}}}})
    assert values["telemetry/weights_forward/mlp/nmse"] == 1e-2
    spread = values["telemetry/weights_forward/nmse_by_class"]
    assert sum(spread.histogram) == 2
    assert math.isclose(spread.bins[0], -4.0)
    assert math.isclose(spread.bins[-1], -2.0)
    assert "telemetry/grads_inter/nmse_by_class" not in values
