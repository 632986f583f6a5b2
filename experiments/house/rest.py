# ruff: noqa
"""Last part of move.sh: what a rewriting of names cannot know."""

import pathlib, re, subprocess, sys, shutil

tree = pathlib.Path(__file__).resolve().parents[2]


def sub(f, *pairs):
    p = tree / f
    s = p.read_text()
    for a, b in pairs:
        if a not in s:
            print("  ?? not in", f, ":", a[:60])
            continue
        s = s.replace(a, b)
    p.write_text(s)


g = tree / ".gitignore"
g.write_text(
    "".join(
        (
            f"/{l}"
            if l in ("build/", "dist/", "runs/", "data_cache/", "outputs/", "multirun/", "wandb/")
            else l
        )
        + "\n"
        for l in g.read_text().split()
    )
)
sub(
    "zpp_lab/runs/provenance.py",
    (
        "PACKAGE = Path(__file__).resolve().parent\n",
        "PACKAGE = Path(__file__).resolve().parents[1]\n",
    ),
)
if (tree / "zpp_lab/study/templates").exists():
    subprocess.run(
        ["git", "mv", "zpp_lab/study/templates", "zpp_lab/study/report/templates"],
        cwd=tree,
        check=True,
    )
sub(
    "zpp_lab/study/__init__.py",
    (
        '{"run_study": "launch", "StudyOutcome": "outcome", "build_report": "report"}',
        '{"run_study": "run.launch", "StudyOutcome": "run.attempts"}',
    ),
    (
        '_HOMES |= {"Report": "report"}',
        '_HOMES |= {"build_report": "report.report", "Report": "report.report"}',
    ),
)
shutil.copy(tree / "experiments/house/walls.py", tree / "tests/test_walls.py")
shutil.copy(tree / "experiments/house/architecture.md", tree / "ARCHITECTURE.md")
s = tree / "zpp_lab/tools/bench/step/__init__.py"
s.write_text(
    '"""`zpp-lab bench step`: training steps of several recipes over links of several speeds."""\n\n\ndef main(words: list[str]) -> int:\n    """The command; its parts import torch, which words that are wrong do not wait for."""\n    from zpp_lab.tools.bench.step.command import main as command\n\n    return command(words)\n'
)
for f in ("zpp_lab/collectives/transport.py",):
    sub(
        f,
        (
            "`ProcessGroups` is the transport over torch.distributed, on NCCL or gloo; `collectives/peer/transport.py` has the one\nfor ranks that read each other's memory.",
            "`ProcessGroups` is the transport over torch.distributed, on NCCL or gloo; `peer/transport.py` has\nthe one for ranks that read each other's memory.",
        ),
    )
sub(
    "zpp_lab/study/report/speed/tables.py",
    (
        "# Predictions for what was measured, and why others have none: `zpp_lab.tools.plan.cost.show.predictions` of a\n# machine. It is handed in,",
        "# Predictions for what was measured, and why others have none: `tools.plan.cost.show.predictions` of\n# a machine. It is handed in,",
    ),
)
sub(
    "zpp_lab/collectives/watchdog.py",
    (
        "other (`train/launch/heartbeat.py`), they ask here what this one waits for, and hear of a transfer that is late.",
        "other (`train/launch/heartbeat.py`), they ask here what this one waits for, and hear of a transfer\nthat is late.",
    ),
)
sub(
    "experiments/parity/links.py",
    (
        "from zpp_lab.tools.links.programs import Tools\n",
        "from zpp_lab.tools.links.programs import Tools  # noqa: E402\n",
    ),
    ("import EmulationError\n", "import EmulationError  # noqa: E402\n"),
)
subprocess.run(["git", "add", "-A"], cwd=tree)
