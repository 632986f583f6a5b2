"""What a study's workspace and report in wandb show, as plain JSON.

Made from the study alone, so that it can be written on a machine without a key, read, changed
by hand, and applied later. The names of the series are those that `runs/wandb/` sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zpp_lab.config.flat import as_written
from zpp_lab.config.study import StudyConfig
from zpp_lab.config.wires import WIRES, Wire, wires_among
from zpp_lab.files import parse_json
from zpp_lab.study.report.style import study_looks

FORMAT = 2
FILE = "dashboard.json"
Spec = dict[str, Any]
Panel = dict[str, Any]

_COLUMNS = (
    "config:arm.value",
    "config:seed.value",
    "summary:final/heldout_loss",
    "summary:final/bytes_share",
    "summary:final/bytes_share_inter",
    "summary:final/tokens_per_second",
    "summary:final/outcome",
)


def make_spec(
    study: StudyConfig,
    *,
    project: str,
    entity: str | None = None,
    verdicts: str = "",
    chosen: Sequence[str] = (),
) -> Spec:
    """Return the specification of a study's pages.

    verdicts: the verdict table in Markdown as of now; "" before anything has run. chosen: the arms
    that the report tells apart, where there are many; () before anything has run.
    """
    bases = [study.baseline, *(arm.against for arm in study.arms if arm.against)]
    gaps, wires = [f"gap_vs_{name}" for name in dict.fromkeys(bases)], wires_of(study)
    colors = {arm: look.color for arm, look in study_looks(study, chosen).items()}
    rule = (
        f"Baseline {study.baseline}; margin ±{study.margin_text}; "
        f"{study.confidence:.0%} confidence; {len(study.arms)} arms."
    )
    sections = {  # name → runs of its panels in the report, and the panels
        "Verdicts": ("report", [{"kind": "table", "name": "verdicts"}]),
        "Results": ("arms", _results(gaps)),
        "Settings and results": ("runs", [_coordinates(gaps)]),
        "Loss": ("arms", _losses() if study.points is None else _rewards()),
        "Gap": ("arms", _gaps(gaps)),
        "Tokens and time": ("arms", _other_axes(gaps)),
        "Speed and memory": ("arms", _speed()),
        "Bytes": ("arms", _bytes(wires)),
        "Errors": ("arms", _telemetry(wires)),
    }
    return {
        "format": FORMAT,
        "study": study.name,
        "project": project,
        "entity": entity,  # None: the account's own
        "runs": {
            "group": study.name,
            "not_job_type": "report",
            "group_by": "job_type",
            "colors": colors,  # by arm, as in the report's figures
        },
        "title": f"Study {study.name}"[:128],
        "description": study.question,
        "text": "\n\n".join(filter(None, [f"**{study.question}**", rule, verdicts])),
        "columns": [*_COLUMNS, *(f"summary:final/{name}" for name in gaps)],
        "sections": [
            {"name": name, "runs": runs, "panels": panels}
            for name, (runs, panels) in sections.items()
        ],
    }


def wires_of(study: StudyConfig) -> tuple[Wire, ...]:
    """Return all wires that some arm has by its settings, or its recipe's file."""
    lines = [*study.overrides, *(o for arm in study.arms for o in arm.overrides)]
    files = [as_written(o.removeprefix("recipe=")) for o in lines if o.startswith("recipe=")]
    settings = {f"{key}={value}" for file in files for key, value in file.items()} | {*lines}
    return tuple(w for w, s in WIRES.items() if not s.needs or settings & {*s.brought_by})


def read_spec(path: Path) -> Spec:
    """Raise ValueError when the file is no specification of this version."""
    spec = parse_json(path, "run zpp-lab dashboard again")
    if not isinstance(spec, dict) or spec.get("format") != FORMAT:
        raise ValueError(
            f"{path}: invalid, a dashboard specification of format {FORMAT} is needed; run "
            "zpp-lab dashboard again"
        )
    return spec


def _line(title: str, y: list[str], x: str = "step", **more: Any) -> Panel:
    """Arms as means over their seeds, with a band from the least to the largest."""
    return {"kind": "line", "title": title, "x": x, "y": y, "group_by": "job_type", **more}


def _bar(title: str, metric: str) -> Panel:
    return {"kind": "bar", "title": title, "metric": metric, "group_by": "job_type"}


def _losses() -> list[Panel]:
    """Losses, in nats a token or, of reward models, a pair: a study alone does not tell which."""
    return [
        _line("Held-out loss (nats)", ["heldout_loss"]),
        _line("Training loss (nats)", ["loss"]),
        _line("Gradient norm", ["grad_norm"], log_y=True),
    ]


def _rewards() -> list[Panel]:
    shown = {
        "Held-out success": "heldout_accuracy",
        "Reward of rollouts": "rl/reward",
        "Success of rollouts": "rl/success",
        "Tokens of a completion": "rl/length",
        "Entropy (nats per token)": "rl/entropy",
        "KL to the start (nats per token)": "rl/kl",
        "Mismatch of rollout and training (nats per token)": "rl/mismatch",
        "Share of ratios clipped": "rl/clipped",
        "Groups without variance": "rl/flat_groups",
    }
    norm = _line("Gradient norm", ["grad_norm"], log_y=True)
    return [*(_line(title, [name]) for title, name in shown.items()), norm]


def _gaps(names: list[str]) -> list[Panel]:
    return [
        _line(f"{title} against {name.removeprefix('gap_vs_')}", [f"{name}/{key}"], f"{name}/step")
        for name in names
        for key, title in (("heldout_loss", "Held-out loss gap"), ("loss", "Training loss gap"))
    ]


def _other_axes(gaps: list[str]) -> list[Panel]:
    """Losses over tokens, as step sizes differ, and over training's seconds; gaps over tokens."""
    losses = [
        _line(f"Held-out loss over {found}", ["heldout_loss"], axis)
        for axis, found in (("tokens", "tokens"), ("seconds", "seconds of training"))
    ]
    return losses + [
        _line(
            f"Held-out loss gap against {name.removeprefix('gap_vs_')} over tokens",
            [f"{name}/heldout_loss"],
            f"{name}/tokens",
        )
        for name in gaps
    ]


def _speed() -> list[Panel]:
    return [
        _line("Tokens a second, step by step", ["tokens_per_second"]),
        _line("MFU", ["mfu"]),
        _line("Seconds of a step spent waiting", ["wait/data", "wait/device"]),
        _line("Peak GPU memory so far, GiB", ["memory/gpu_gib", "memory/reserved_gib"]),
        _line("Peak host memory so far, GiB", ["memory/host_gib"]),
    ]


def _coordinates(gaps: list[str]) -> Panel:
    """A line a run: from what its wires carry to what came of it. wandb leaves out what lacks one
    of the values, as the baseline does its gap."""
    columns = [f"config:wires.{wire}" for wire in wires_among()]
    columns += [f"summary:final/{name}" for name in ("bytes_share", "tokens_per_second")]
    columns += ["summary:final/heldout_loss", *(f"summary:final/{name}" for name in gaps)]
    return {"kind": "coordinates", "title": "One line a run", "columns": columns}


def _results(gaps: list[str]) -> list[Panel]:
    scatter = [
        {
            "kind": "scatter",
            "title": "Gap and bytes, one point a run",
            "x": "summary:final/bytes_share",
            "y": f"summary:final/{name}",
        }
        for name in gaps
    ]
    bars = [_bar(f"Final gap, {name.removeprefix('gap_vs_')}", f"final/{name}") for name in gaps]
    return [*bars, _bar("Share of the baseline's bytes", "final/bytes_share"), *scatter]


def _bytes(wires: Sequence[Wire]) -> list[Panel]:
    hops = [
        _line(f"Bytes a step {where}", [f"bytes/{wire}/{hop}" for wire in wires])
        for hop, where in (("intra", "inside nodes"), ("inter", "between nodes"))
    ]
    return [
        _line("Bytes a step, all wires", ["train/bytes"]),
        *hops,
        _bar("Tokens a second", "final/tokens_per_second"),
    ]


def _telemetry(wires: Sequence[Wire]) -> list[Panel]:
    """nmse of each parameter class; the histograms over classes are wandb's own panels."""
    return [
        {
            **_line(f"Error of {wire} by parameter class (nmse)", [], log_y=True),
            "regex": f"telemetry/{wire}/[^/]+/nmse",
        }
        for wire in wires
    ]
