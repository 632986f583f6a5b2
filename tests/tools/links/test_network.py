"""The commands that join nodes, as a recorder in place of `ip` and `tc` sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zpp_lab.tools.links.network import FOLDER, TBF, VETH, Command, Network, Tools, bucket
from zpp_lab.tools.links.nodes import OneHost, hosts
from zpp_lab.train.launch.processes import EmulationError


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A folder whose `ip` and `tc` write down what they are asked."""
    for name in ("ip", "tc"):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/log\n')
        script.chmod(0o755)
    return tmp_path


def test_impossible_shapes_and_speeds_are_refused() -> None:
    with pytest.raises(ValueError, match="2 to 250"):
        Network(251, 1)
    with pytest.raises(ValueError, match="or max"):
        bucket(0.0)
    with pytest.raises(ValueError, match="use max"):
        OneHost().limit(25.0)


def test_missing_tools_and_kernel_parts_name_the_fix(
    recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recorder / "bin" / "tc").unlink()
    monkeypatch.setenv(FOLDER, str(recorder))
    with pytest.raises(EmulationError, match="iproute2"):
        hosts(2)
    script = recorder / "bin" / "tc"
    script.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    script.chmod(0o755)
    with pytest.raises(EmulationError, match="modprobe sch_tbf"):
        Tools.find().run(Command(0, ("tc", "qdisc"), TBF), 0)
    script.write_text("#!/bin/sh\necho 'RTNETLINK answers: Operation not permitted' >&2\nexit 2\n")
    with pytest.raises(EmulationError, match="root"):
        Tools.find().run(Command(0, ("tc", "qdisc"), TBF), 0)
    with pytest.raises(EmulationError):
        Tools.find(recorder / "nowhere")
    assert "modprobe veth" in VETH
