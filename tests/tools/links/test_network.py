"""The commands that join nodes, as a recorder in place of `ip` and `tc` sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zpp_lab.config.schema import ClusterConfig
from zpp_lab.tools.links.network import TBF, VETH, Command, Network, bucket
from zpp_lab.tools.links.nodes import OneHost, hosts
from zpp_lab.tools.links.programs import FOLDER, Tools
from zpp_lab.train.launch.gpus import place, visible_gpus
from zpp_lab.train.launch.processes import EmulationError
from zpp_lab.train.launch.ranks import node_environment, rank_environment


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A folder whose `ip` and `tc` write down what they are asked."""
    for name in ("ip", "tc"):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/log\n')
        script.chmod(0o755)
    return tmp_path


def test_limits_are_set_changed_and_taken_away() -> None:
    network = Network(2, 7)
    assert network.limit(None, limited=False) == []
    assert [c.words[1:3] for c in network.limit(None, limited=True)] == [("qdisc", "del")] * 2
    for gbps in (0.2, 12.0, 400.0):
        words = network.limit(gbps, True)[0].words
        assert words[:3] == ("tc", "qdisc", "replace")
        said = dict(zip(words[7::2], words[8::2], strict=True))
        assert said["rate"] == f"{gbps * 1e6:.0f}kbit"
        assert int(said["burst"]) >= 65536  # a whole packet of a socket
        assert 2**30 <= int(said["limit"]) < 2**32  # more than 200 sockets hand over; tc's most


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
    with pytest.raises(EmulationError, match=r"no tc in .*install iproute2"):
        hosts(2)
    script = recorder / "bin" / "tc"
    script.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    script.chmod(0o755)
    with pytest.raises(EmulationError, match=r"qdisc kind is unknown.*modprobe sch_tbf"):
        Tools.find().run(Command(0, ("tc", "qdisc"), TBF), 0)
    script.write_text("#!/bin/sh\necho 'RTNETLINK answers: Operation not permitted' >&2\nexit 2\n")
    with pytest.raises(EmulationError, match=r"It needs the right to configure a network \(root"):
        Tools.find().run(Command(0, ("tc", "qdisc"), TBF), 0)
    with pytest.raises(EmulationError, match="no such folder"):
        Tools.find(recorder / "nowhere")
    assert "modprobe veth" in VETH


class TwoHosts(OneHost):
    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.interface = 2, "zpp5"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"


def test_ranks_learn_their_place_their_gpus_and_their_host() -> None:
    cluster = ClusterConfig(nodes=2, gpus_per_node=2)
    given = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "NCCL_SOCKET_NTHREADS": "2"}
    placed = place(cluster, visible_gpus(given))
    said = [rank_environment(TwoHosts(), placed, rank, 1234, given) for rank in range(4)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in said] == ["4,5", "4,5", "6,7", "6,7"]
    assert [(e["GROUP_RANK"], e["LOCAL_RANK"]) for e in said] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    assert len({e["NCCL_HOSTID"] for e in said}) == 2
    assert {e["MASTER_ADDR"] for e in said} == {"10.77.0.1"}
    assert said[0]["NCCL_SOCKET_NTHREADS"] == "2"  # the user's own wins
    assert said[0]["NCCL_SOCKET_IFNAME"] == "=zpp5"
    alone = place(ClusterConfig(nodes=1, gpus_per_node=4), list("01234567"))
    one = node_environment(OneHost(), alone, 0, 1, {})
    assert one["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert "NCCL_HOSTID" not in one  # one host is one host
