"""Faults of the links between emulated nodes: cut, pulled, or losing packets."""

from __future__ import annotations

from zpp_lab.tools.links.network import HUB, NET, Command, bucket, ip, tc
from zpp_lab.tools.links.nodes import EmulatedNodes
from zpp_lab.train.launch.processes import EmulationError

RANDOM = 2**32 - 0x1000 + 56  # where BPF's programs find a random word
OK, SHOT = 0, 2  # what they tell tc
LOSS = "tc's BPF filters (CONFIG_NET_SCH_INGRESS, CONFIG_NET_CLS_BPF), or CONFIG_NET_SCH_NETEM"
HOLE = "tc's queue that drops all (CONFIG_NET_SCHED)"


def ends_of(nodes: EmulatedNodes, node: int) -> list[tuple[int, str]]:
    """Where a node's own link begins and ends; of two nodes they have the same one."""
    net = nodes.network
    far = (HUB, net.port(node)) if net.needs_hub else (1 - node, net.interface)
    return [(node, net.interface), far]


def cut(nodes: EmulatedNodes, node: int, told: bool) -> None:
    """Nothing passes a node's link until `mend`. told: both ends notice, as of a cable that is
    pulled; else packets vanish, as in a switch that fails."""
    ends = ends_of(nodes, node)
    if told:
        nodes.run([ip(at, f"link set {end} down", NET) for at, end in ends])
    else:
        nodes.run([tc(at, f"qdisc replace dev {end} root blackhole", HOLE) for at, end in ends])


def mend(nodes: EmulatedNodes, node: int, told: bool) -> None:
    """After `cut`: the link is as it was, at its speed."""
    ends = ends_of(nodes, node)
    if told:
        nodes.run([ip(at, f"link set {end} up", NET) for at, end in ends])
        nodes.run([nodes.network.route(at) for at, _ in ends if at != HUB])
    elif nodes.gbps is None:
        nodes.run([tc(at, f"qdisc del dev {end} root", HOLE) for at, end in ends])
    else:
        limit = bucket(nodes.gbps)
        nodes.run([tc(at, f"qdisc replace dev {end} root {limit}") for at, end in ends])


def lose(nodes: EmulatedNodes, share: float) -> str:
    """From now on each link drops this share of packets at random; by what: `bpf`, beside limits,
    or `netem`, in their place. EmulationError where the kernel has neither."""
    try:
        for at, end in nodes.network.ends():
            add = f"tc filter add dev {end} egress bpf direct-action bytecode".split()
            clsact = tc(at, f"qdisc replace dev {end} clsact", LOSS)
            nodes.run([clsact, Command(at, (*add, dropping(share)), LOSS)])
        return "bpf"
    except EmulationError:
        if nodes.gbps is not None:
            raise
    words = f"root netem limit {10**6} loss {100 * share:g}%"
    ends = nodes.network.ends()
    nodes.run([tc(at, f"qdisc replace dev {end} {words}", LOSS) for at, end in ends])
    return "netem"


def dropping(share: float) -> str:
    """A classic BPF program for tc: load a random word; drop the packet if it is small enough."""
    load, at_least, give = 0x20, 0x35, 0x06
    steps = [(load, 0, 0, RANDOM), (at_least, 1, 0, round(share * 2**32)), (give, 0, 0, SHOT)]
    steps.append((give, 0, 0, OK))
    return ",".join([str(len(steps)), *(" ".join(map(str, step)) for step in steps)])
