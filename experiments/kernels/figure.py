"""Draws h200.svg from h200.json: python experiments/kernels/figure.py"""

from __future__ import annotations

import json
from pathlib import Path

import bench

HERE = Path(__file__).parent

if __name__ == "__main__":
    bench.draw(json.loads((HERE / "h200.json").read_text()), HERE / "h200.svg")
