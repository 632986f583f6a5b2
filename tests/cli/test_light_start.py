"""Commands that only look, and launchers that only start ranks, do without what takes seconds to
import: of torch its compiler, sharded tensors and their checkpoints, and all of the report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OF_TORCH = ("_dynamo", "_inductor", "distributed.checkpoint", "distributed.fsdp")
HEAVY = {f"torch.{name}" for name in (*OF_TORCH, "distributed.tensor")}
HEAVY |= {"sympy", "transformers", "tokenizers", "pandas", "altair", "scipy", "statsmodels"}
HEAVY |= {"wandb", "zpp_lab.train.trainer"}
CODE = """
import sys
from zpp_lab.cli.main import main
for command in sys.argv[2:]:
    try:
        code = main(command.split())
    except SystemExit as end:
        code = end.code
    print("ended with", code)
print("found", sorted(set(sys.argv[1].split()) & set(sys.modules)))
"""


def ran(heavy: set[str], folder: Path, *commands: str) -> tuple[list[str], str]:
    """How each command ended, in one process, and which heavy modules it has then; its stderr."""
    words = [sys.executable, "-c", CODE, " ".join(heavy), *commands]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith(("ended", "found"))], done.stderr


def test_no_torch_for_help_settings_and_mistakes(tmp_path: Path) -> None:
    good = ("--help", "train --help", "train --dry-run", "bench step --help")
    bad = ("train modell=tiny", "study smok", "study smoke --watch", "plan recipe=w3")
    ended = [*["ended with 0"] * len(good), *["ended with 2"] * len(bad)]
    lines, _ = ran(HEAVY | {"torch", "numpy"}, tmp_path, *good, *bad)
    assert lines == [*ended, "found []"]


def test_torch_alone_for_plans_and_where_ranks_are_started(tmp_path: Path) -> None:
    """Up to the check that refuses these: 64 ranks are too many for this machine's memory."""
    plan = "plan model=125m cluster=2x2 recipe=zeropp train.param_dtype=bf16 --machine h200"
    cluster = "cluster.nodes=1 cluster.gpus_per_node=64 model=32_5b data.tokenizer=bytes"
    train = f"train engine=fsdp engine.device=cpu {cluster} run.dir={tmp_path / 'run'}"
    lines, errors = ran(HEAVY, tmp_path, plan, "study bits --dry-run", train)
    assert "64 ranks on the CPU need" in errors
    assert lines == ["ended with 0", "ended with 0", "ended with 2", "found []"]
