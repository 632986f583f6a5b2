"""Where the host's time goes in a step, from the traces that `gpu.sh OUT profile` writes.

    python experiments/parity/trace.py OUT/profile/trace-*.json.gz --out host-time.json

Medians in microseconds, with the profiler on, which makes the host slower. FSDP2's named ranges
are cut where its copy operators land in our code:

    gather     before copy-in (FSDP2: casts, allocation); copy-in with encode; shipment
    copy-out   the operator that decodes
    reduction  before copy-in (FSDP2); copy-in with encode; shipments (and the middle of two
               hops); sum; after it (our events, then FSDP2: division, sharded gradients)
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
GATHER, COPY_OUT, REDUCTION = (
    "FSDP::all_gather",
    "FSDP::all_gather_copy_out",
    "FSDP::post_backward_reduce",
)


def parts_of(events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """(part, microseconds) of every collective."""
    ranges = [e for e in events if e.get("cat") == "user_annotation"]
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    for whole in ranges:
        name = whole["name"].partition(" (")[0]
        if name in (GATHER, COPY_OUT, REDUCTION):
            inside = {e["name"]: e for e in operators if _inside(e, whole)}
            yield from _cut(name, whole, inside)


def _cut(name: str, whole: Event, inside: dict[str, Event]) -> Iterator[tuple[str, float]]:
    begin, end = whole["ts"], _end(whole)
    if name == COPY_OUT and (copy := inside.get("fsdp::split_with_sizes_copy")):
        yield "copy-out: decode", copy["dur"]
    if name == GATHER and (copy := inside.get("fsdp::all_gather_copy_in")):
        yield "gather: before copy-in (FSDP2)", copy["ts"] - begin
        yield "gather: copy-in and encode", copy["dur"]
        yield "gather: shipment", end - _end(copy)
    if name == REDUCTION and (copy := inside.get("fsdp::chunk_cat")):
        encode, last = inside["zpp_lab::encode"], inside["zpp_lab::reduce"]
        yield "reduction: before copy-in (FSDP2)", copy["ts"] - begin
        yield "reduction: copy-in and encode", _end(encode) - copy["ts"]
        yield "reduction: shipments", last["ts"] - _end(encode)
        yield "reduction: sum", last["dur"]
        yield "reduction: after it (events; FSDP2: division)", end - _end(last)


def _inside(event: Event, whole: Event) -> bool:
    own = event["tid"] == whole["tid"] and event["ts"] >= whole["ts"]
    return bool(own and _end(event) <= _end(whole))


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for path in args.traces:
        with gzip.open(path) as file:
            events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
        times: dict[str, list[float]] = defaultdict(list)
        for part, microseconds in parts_of(events):
            times[part].append(microseconds)
        found[path.name] = {
            part: {"us": round(statistics.median(own), 1), "of": len(own)}
            for part, own in sorted(times.items())
        }
        for part, own in found[path.name].items():
            print(f"{path.name} {part}: {own['us']} us, median of {own['of']}")
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
