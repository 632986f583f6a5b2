"""The codecs' kernels against the memory's speed: python experiments/kernels/bench.py --help

Counts the bytes that must move (inputs once, outputs once) and gives the rate as a fraction of
a copy measured in the same run. Writes JSON and, where altair is installed, a figure: rates as a
share of a copy, one panel a kind of codec.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure import (
    OPS,
    Work,
    copy_work,
    decoder_block,
    device_seconds,
    eager_device_seconds,
    fill_work,
    host_seconds,
    measure_peers,
    one_segment,
    remembering,
    sets_for,
    work,
)

from zpp_lab.codecs import BlockCodec, kernels
from zpp_lab.codecs.kernels.memory import Memory
from zpp_lab.config.codec import BITS
from zpp_lab.config.parser import Parser, whole
from zpp_lab.files import write_atomic

KINDS = {
    "nearest": "nearest rounding",
    "stochastic": "stochastic rounding (where noise is drawn)",
    "Hadamard 64": "Hadamard 64, nearest rounding",
}
MIB = 2**20
# of 2, 4, 6 and 8 bits, on a light page and on a dark one
COLORS = {"#332288": "#a9abfe", "#0b6eff": "#1571ff", "#44aa99": "#007769", "#d4a017": "#715300"}
Row = dict[str, Any]


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Block 64, symmetric, fp32 scales, the largest size: what the figure shows."""
    largest = max(row["mib"] for row in report["grid"])
    rows = []
    for row in report["grid"]:
        plain = row["symmetric"] and row["block"] == 64 and row["scales"] == "fp32"
        if not plain or row["mib"] != largest or (row["hadamard"] and row["rounding"] != "nearest"):
            continue
        kind = "Hadamard 64" if row["hadamard"] else row["rounding"]
        rows.append({**row, "kind": kind, "bits": f"{row['bits']} bit"})
    return rows


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the figure as SVG, in the look of the other pages. ImportError where altair is not
    installed."""
    import altair

    sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))
    from law import figure

    largest = max(row["mib"] for row in report["grid"])
    title = {
        "text": f"Codec kernels on {report['machine']['gpu']}",
        "subtitle": [
            f"{largest} MiB of bf16; block 64, symmetric",
            f"% of the rate of a copy ({report['copy_gb_s']:.0f} GB/s)",
        ],
    }
    rows = rows_of(report)
    ops = [op for op in OPS if any(row["op"] == op for row in rows)]
    bits = sorted({row["bits"] for row in rows})
    operators = altair.X(
        "op:N",
        title=None,
        sort=ops,
        scale=altair.Scale(domain=ops),  # the same places in every panel
        axis=altair.Axis(labelAngle=0, labelExpr="split(datum.label, 'sum_')", labelFontSize=12),
    )
    rate = altair.Y(
        "of_copy:Q",
        title=None,
        axis=altair.Axis(format="%", tickCount=3),
        scale=altair.Scale(domain=[0, 1]),
    )
    legend = altair.Legend(
        orient="bottom", title=None, labelFontSize=14, labelColor="#374151", symbolType="square"
    )
    scale = altair.Scale(domain=bits, range=[*COLORS][: len(bits)])
    panels = []
    for kind, text in KINDS.items():
        values = altair.Data(values=[row for row in rows if row["kind"] == kind])
        bars = altair.Chart(values, title=altair.Title(text, fontSize=15)).mark_bar()
        bars = bars.encode(
            x=operators,
            xOffset=altair.XOffset("bits:N", sort=bits),
            y=rate,
            color=altair.Color("bits:N", scale=scale, legend=legend),
        )
        panels.append(bars.properties(width=460, height=110))
    made = altair.vconcat(*panels, title=title)
    write_atomic(path, figure(made, COLORS))


def copy_rate_of(mib: int) -> float:
    """Bytes per second of a copy of `mib` MiB, the faster of a plain and a captured one.

    A graph may hand a copy to the copy engines, which are slower than a kernel.
    """
    task = copy_work(2 * mib * MIB)
    calls = [task.prepare() for _ in range(sets_for(task.nbytes))]
    return task.nbytes / min(device_seconds(calls), eager_device_seconds(calls))


def timed(task: Work, limit: int = 24) -> float:
    """Seconds of one call on the device."""
    calls = [task.prepare() for _ in range(min(limit, sets_for(task.nbytes)))]
    return device_seconds(calls)


def codecs(full: bool) -> Iterator[BlockCodec]:
    """Every bit width, both kinds of levels, both roundings, several blocks, with a rotation."""
    for bits in BITS:
        for symmetric in (True, False):
            yield BlockCodec(bits, 64, symmetric)
            yield BlockCodec(bits, 64, symmetric, "stochastic")
        for block in (32, 256, 512, 2048, 8192) if full else (256,):
            yield BlockCodec(bits, block)
        yield BlockCodec(bits, 64, hadamard=64)
        yield BlockCodec(bits, 64, scale_dtype="bf16")
        if full:
            yield BlockCodec(bits, 256, rounding="stochastic", hadamard=64)


def measure_grid(mib: int, copy_rate: float, full: bool) -> list[Row]:
    """Each operator and codec on `mib` MiB of bf16 values."""
    rows = []
    for codec in codecs(full):
        layout = one_segment(codec, mib * MIB // 2)
        for op in OPS:
            if codec.stochastic and not op.startswith(("encode", "decode_sum_encode")):
                continue  # decoding does not depend on rounding
            task = work(op, layout)
            seconds = timed(task)
            rows.append(_row(op, codec, mib, task.nbytes, seconds, copy_rate))
    return rows


def _row(op: str, codec: BlockCodec, mib: int, nbytes: int, seconds: float, copy: float) -> Row:
    rate = nbytes / seconds
    return {
        "op": op,
        "bits": codec.bits,
        "symmetric": codec.symmetric,
        "rounding": codec.rounding,
        "block": codec.block_size,
        "hadamard": codec.hadamard,
        "scales": codec.scale_dtype,
        "mib": mib,
        "us": round(seconds * 1e6, 2),
        "gb_s": round(rate / 1e9, 1),
        "of_copy": round(rate / copy, 4),
    }


def measure_small(copy_rate: float) -> list[Row]:
    """1 MiB of bf16: time on the device, and until the call returns."""
    rows = []
    codec = BlockCodec(4, 64)
    layout = one_segment(codec, MIB // 2)
    for op in OPS:
        task = work(op, layout)
        row = _row(op, codec, 1, task.nbytes, timed(task), copy_rate)
        rows.append(row | {"host_us": round(host_seconds(task.prepare()) * 1e6, 2)})
    return rows


def measure_telemetry(mib: int) -> list[Row]:
    """Encode with and without error sums."""
    layout = one_segment(BlockCodec(4, 64), mib * MIB // 2)
    plain, sums = timed(work("encode", layout)), timed(work("encode with errors", layout))
    return [{"mib": mib, "plain_us": plain * 1e6, "with_errors_us": sums * 1e6}]


def measure_memory(mib: int, widths: Sequence[int] = (8, 4, 2)) -> list[Row]:
    """Encode with a residual memory in each store: its rate over that of encode without one."""
    rows = []
    for bits, hadamard in product(widths, (0, 64)):
        layout = one_segment(BlockCodec(bits, 64, hadamard=hadamard), mib * MIB // 2)
        plain = work("encode", layout)
        rate = plain.nbytes / timed(plain)
        for store in ("fp32", "bf16", "8bit"):
            task = remembering(layout, Memory(store))  # type: ignore[arg-type]
            seconds = timed(task)
            row = {"bits": bits, "hadamard": hadamard, "store": store, "mib": mib}
            row |= {"us": seconds * 1e6, "gb_s": task.nbytes / seconds / 1e9}
            rows.append(row | {"of_plain": task.nbytes / seconds / rate})
    return rows


def measure_segments() -> list[Row]:
    """A 13B decoder block in 10 segments against one segment of the same length."""
    rows = []
    for shards in (1, 8):
        codec = BlockCodec(4, 64)
        many = decoder_block(codec, shards)
        one = one_segment(codec, many.numel)
        for op in OPS:
            a, b = timed(work(op, many)), timed(work(op, one))
            rows.append({"op": op, "shards": shards, "ten_us": a * 1e6, "one_us": b * 1e6})
    return rows


def machine() -> dict[str, str]:
    properties = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "gpu": properties.name,
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }


def print_table(rows: list[Row]) -> None:
    for row in rows:
        kind = f"{row['bits']} {'sym' if row['symmetric'] else 'asym':4} {row['rounding'][:5]}"
        shape = f"B{row['block']:<4} H{row['hadamard']:<2} {row['scales']} {row['mib']:>3}M"
        speed = f"{row['us']:7.1f}us {row['gb_s']:5.0f}GB/s {row['of_copy']:6.1%}"
        print(f"{row['op']:17} {kind} {shape} {speed}")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="bench.py", description=__doc__)
    parser.add_argument(
        "--mib", type=whole(1), nargs="*", default=[64, 512], help="bf16 bytes per call"
    )
    parser.add_argument("--full", action="store_true", help="every block size and scale dtype")
    parser.add_argument("--peers", action="store_true", help="also torch.compile and DeepSpeed")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-kernels"))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ValueError("this needs an NVIDIA GPU, and torch sees none here: run it where one is")
    kernels.configure("cuda")
    report: dict[str, Any] = {"machine": machine(), "grid": [], "copy": []}
    args.out.mkdir(parents=True, exist_ok=True)
    for part in (_speed, _kinds, _peers):  # what is there is kept, should a later part fail
        part(report, args)
        (args.out / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")
    _draw(report, args.out / "kernels.svg")
    print(f"written to {args.out}")
    return 0


def _speed(report: dict[str, Any], args: argparse.Namespace) -> None:
    copy_rate = copy_rate_of(1024)
    report["copy_gb_s"] = copy_rate / 1e9
    report["fill_gb_s"] = 1024 * MIB / timed(fill_work(1024 * MIB)) / 1e9
    print(f"copy {copy_rate / 1e9:.0f} GB/s (read + write, 1 GiB)")
    print(f"fill {report['fill_gb_s']:.0f} GB/s (write alone, 1 GiB)")
    for mib in args.mib:
        rate = copy_rate_of(mib)
        report["copy"].append({"mib": mib, "gb_s": rate / 1e9})
        print(f"copy of {mib} MiB: {rate / 1e9:.0f} GB/s")
        report["grid"] += measure_grid(mib, copy_rate, args.full)
    print_table(report["grid"])


def _kinds(report: dict[str, Any], args: argparse.Namespace) -> None:
    """One small call, many segments, telemetry."""
    report["small"] = measure_small(report["copy_gb_s"] * 1e9)
    report["segments"] = measure_segments()
    report["telemetry"] = measure_telemetry(max(args.mib))
    print_table(report["small"])
    print("until the call returns:", {r["op"]: r["host_us"] for r in report["small"]})
    for row in report["segments"]:
        times = row["ten_us"] / row["one_us"]
        print(f"10 segments / 1: {row['op']:18} 1/{row['shards']} {times:.4f}")
    print("telemetry:", report["telemetry"])
    report["memory"] = measure_memory(max(args.mib))
    for row in report["memory"]:
        print("memory:", row)


def _peers(report: dict[str, Any], args: argparse.Namespace) -> None:
    if args.peers:
        report["peers"] = measure_peers()


def _draw(report: dict[str, Any], path: Path) -> None:
    try:
        draw(report, path)
    except ImportError:
        print("no figure: pip install 'zpp_lab[report]' for altair", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
