"""Makes conf/machine/h200.json from the figures that experiments/ keeps.

    python experiments/speed/machine.py

Where `zpp-lab bench calibrate` has run on the machine, its file is the better one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zpp_lab.config.load import load
from zpp_lab.tools.plan.cost.machine import Machine

HERE = Path(__file__).resolve().parents[1]
MIB = 2**20
ALTERNATIVES = (256, 64)  # blocks, the first that was measured
KINDS = {"": ("nearest", 0), "r": ("stochastic", 0), "h": ("nearest", 64)}
LINE = re.compile(
    r"^(gather|reduce) +(raw|\d) \S+ +(\d+) MiB 1x4 (groups|peer) .* "
    r"stages: ([\d.]+), ([\d.]+), ([\d.]+)"
)
AUTO_MIB = 16  # engine.transport=auto: from such shipments on, peer memory

# Of experiments/parity: milliseconds, and the launches of torch operators that count_ops gives.
STEP_MS = 137.285  # h200/cost-1x4.json: FSDP2, 1.3B, 1 x 1024 tokens, bound by launches
FSDP2_US = {"gather": 312.4 + 209.9, "reduce": 520.1}  # host.json, 2x2 FSDP2: the CPU time of one
UNITS, BLOCKS = 25, 24
BLOCK_OPS = {"forward": 32, "backward": 67}  # operators that launch something, without views
STEP_OPS = 37 + 20  # embedding, head and loss; AdamW on lists of tensors
NORM_OPS = 997  # of engines/norm.py for 219 parameters
DEVICE = (  # h200/profile-1b.json and profile-1b-long.json: tokens, ms of the model's kernels
    (1024, 33.493),
    (8192, 167.574),
)
MODEL = {"dim": 2048, "layers": 24, "block": 50_855_936, "vocab": 32000}
COMMENT = {
    "made by": "experiments/speed/machine.py, from figures of four H200s of one host (NVLink, "
    "torch 2.11.0+cu130); zpp-lab bench calibrate makes a better file on the machine itself",
    "compute": "experiments/parity/h200/profile-1b.json and profile-1b-long.json: the model's "
    "kernels of 1.35B, eager, 1024 and 8192 tokens a rank, less norm, update and loss at the "
    "memory's rate; other widths and compiled blocks were not measured",
    "memory_bytes_per_s": "experiments/kernels/h200.json: a copy of 1 GiB, read and written",
    "host": "experiments/parity: FSDP2's own calls by host.json (another CPU); the rest of the "
    "launch-bound step of h200/cost-1x4.json (137.285 ms) is divided over its blocks, norm and "
    "update by their number of operators, so the split is an estimate; norm_s is that of the norm "
    "before the norm's kernels, with 997 operators",
    "intra": "experiments/collectives/h200.log, 1 x 4: the transfer alone, NCCL below 16 MiB "
    "received, peer memory from there on; before the first point its time is the latency; "
    "gpu_share: not measured",
    "inter": "efficiency: from one figure, plain FSDP2 of 1.35B over 12 Gbit/s of TCP between two "
    "network namespaces (rows.csv), set so that the model meets it; latency_s: not measured, "
    "nothing beside transfers of 10 ms and more",
    "codec": "experiments/kernels/h200.json, 512 MiB of bf16, blocks of 256 (rotated: 64), sums of "
    "four rows; launch_s: a decode of 1 MiB; raw: stages of experiments/collectives/h200.json",
}


def main() -> None:
    kernels = json.loads((HERE / "kernels/h200.json").read_text())
    rate = kernels["copy_gb_s"] * 1e9
    made = {
        "name": "h200",
        "gpu": "NVIDIA H200",
        "compute": {"eager": {"points": compute(rate)}},
        "memory_bytes_per_s": rate,
        "host": host(),
        "intra": {
            **{op: {"points": inside(op)} for op in ("gather", "reduce")},
            "gpu_share": 0.0,
        },
        "inter": {"latency_s": 0.0, "efficiency": 0.958},
        "codec": {"launch_s": 2.43e-6, "seconds": codecs(kernels["grid"])},
        "comment": COMMENT,
    }
    load(Machine, made).save(HERE.parent / "conf/machine/h200.json")


def compute(rate: float) -> list[list[float]]:
    """[FLOPs of a block's forward, seconds]: norm and update, bound by memory, taken away."""
    numel = MODEL["layers"] * MODEL["block"] + 2 * MODEL["vocab"] * MODEL["dim"]
    points = []
    for tokens, ms in DEVICE:
        sequence = min(tokens, 2048)
        block = 2 * MODEL["block"] * tokens + 2 * sequence * MODEL["dim"] * tokens
        every = 3 * (MODEL["layers"] * block + 2 * MODEL["vocab"] * MODEL["dim"] * tokens)
        rest = (numel / 4 * (76 + 8 + 28) + 24 * tokens * MODEL["vocab"]) / rate
        points.append([float(block), (ms / 1000 - rest) * block / every])
    return points


def host() -> dict[str, Any]:
    gathers = FSDP2_US["gather"] * (2 * UNITS - 1) * 1e-6
    own = STEP_MS / 1000 - gathers - FSDP2_US["reduce"] * UNITS * 1e-6
    each = own / (BLOCKS * sum(BLOCK_OPS.values()) + STEP_OPS + NORM_OPS)
    return {
        "block_forward_s": {"eager": each * BLOCK_OPS["forward"]},
        "block_backward_s": {"eager": each * BLOCK_OPS["backward"]},
        "gather_s": FSDP2_US["gather"] * 1e-6,
        "reduce_s": FSDP2_US["reduce"] * 1e-6,
        "step_s": each * STEP_OPS,
        "norm_s": each * NORM_OPS,
    }


def inside(op: str) -> list[list[float]]:
    """[bytes that a rank receives, seconds of the transfer alone], auto's transport."""
    found: dict[float, float] = {}
    for line in (HERE / "collectives/h200.log").read_text().splitlines():
        if match := LINE.match(line):
            what, kind, mib, transport, _, seconds, _ = match.groups()
            codes = 2.0 if kind == "raw" else int(kind) / 8 + 4 / 256
            received = int(mib) * MIB / 2 * codes * 3 / 4
            wanted = "peer" if received >= AUTO_MIB * MIB else "groups"
            if what == op and transport == wanted:
                found[received] = float(seconds) / 1000
    points, least = [], 0.0
    for received, seconds in sorted(found.items()):
        least = max(least, seconds)  # a larger shipment that was faster: noise of one run
        points.append([received, least])
    return [[0.0, points[0][1]], *points]


def codecs(grid: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds an element of the inputs, of 512 MiB of bf16; sums have four rows."""
    found: dict[str, dict[str, float]] = {}
    for op in ("encode", "decode", "reduce", "decode_sum_encode"):
        rows = 4 if op in ("reduce", "decode_sum_encode") else 1
        found[op] = {"raw": {"encode": 1.12e-12, "decode": 1.055e-12}.get(op, 6.27e-13)}
        for bits in (2, 4, 6, 8):
            for kind, (rounding, rotation) in KINDS.items():
                if us := measured(grid, op, bits, rounding, rotation):
                    found[op][f"{bits}{kind}"] = float(f"{us * 1e-6 / (256 * MIB) / rows:.4g}")
    return found


def measured(grid: list[dict[str, Any]], op: str, bits: int, rounding: str, rot: int) -> float:
    wanted = {"op": op, "bits": bits, "rounding": rounding, "hadamard": rot, "mib": 512}
    wanted |= {"symmetric": True, "scales": "fp32"}
    rows = {r["block"]: r["us"] for r in grid if all(r[k] == v for k, v in wanted.items())}
    return float(next((rows[block] for block in ALTERNATIVES if block in rows), 0.0))


if __name__ == "__main__":
    main()
