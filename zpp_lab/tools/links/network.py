"""The `ip` and `tc` commands that join nodes: names, addresses, links and their limits.

Two nodes are the ends of one veth pair; three or more hang on a bridge in a namespace of its own,
the hub. Every link is limited at both ends. No link loses packets, as under InfiniBand's credits: a
full queue would refuse a socket's next packet, which is then sent again after 200 ms. TCP is set so
that a link's speed is its bound (`congestion_control`, `keep_windows`, `keep_order`). Names carry
the owner's process id.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from zpp_lab.tools.links.namespaces import inside, mount_sysfs
from zpp_lab.train.launch.processes import EmulationError

SETTINGS = Path("/proc/sys/net/ipv4")
AVAILABLE = SETTINGS / "tcp_available_congestion_control"
SLOW_START = SETTINGS / "tcp_slow_start_after_idle"
HUB = -1  # in place of a node's number
MTU = 9000  # bytes: headers take 0.7 % of a link, not 4.4 %
QUEUE = 2**30  # bytes that may wait at a limit: more than all sockets hand over at once
BURST_SECONDS = 5e-4  # of traffic that may pass at once: well above how late timers are
LEAST_BURST = 128 * 1024  # bytes: more than the largest packet that leaves a socket whole
MOST_NODES = 250  # addresses in one network
SUBNET = "10.77.0.0/24"
VETH = "veth pairs (CONFIG_VETH; modprobe veth)"
BRIDGE = "bridges, for three nodes or more (CONFIG_BRIDGE; modprobe bridge)"
TBF = "tc's token bucket (CONFIG_NET_SCH_TBF; modprobe sch_tbf)"
TCP = "TCP congestion control for each route (Linux 4.0) and the named algorithm"
NET = "the right to configure a network (root, or CAP_NET_ADMIN)"


def congestion_control() -> str:
    """Return loss-based, whatever this host's default is: `cubic` where it is loaded, or `reno`,
    which every kernel has.

    BBR measures each stream's share of the link while it sends; among many streams that send in
    bursts and then wait for a step, single ones stay at a small share for 0.2 s at a time.
    """
    names = AVAILABLE.read_text().split() if AVAILABLE.exists() else []
    return "cubic" if "cubic" in names else "reno"


def keep_windows(pid: int) -> bool:
    """Let idle streams in the namespace of process `pid` keep their window, if possible."""
    try:
        inside(pid, lambda: SLOW_START.write_text("0"))
    except OSError:
        return False
    return True


def keep_order(pid: int, interface: str) -> bool:
    """Return each stream's packets that arrive at `interface` go to one processor; whether that
    holds.

    pid: a process in the interface's namespace.
    A veth pair leaves them to the processor that sent them, which changes from packet to packet:
    some overtake others, and TCP takes those for lost, sends them again and slows down.
    """
    steering = Path(f"/sys/class/net/{interface}/queues/rx-0/rps_cpus")

    def steer() -> None:
        mount_sysfs()
        steering.write_text(_mask(os.cpu_count() or 1))

    try:
        inside(pid, steer)
    except OSError:
        return False
    return True


def _mask(processors: int) -> str:
    """All of them, as the kernel reads it: groups of 32 bits, the highest first."""
    digits = f"{2**processors - 1:x}"
    digits = digits.zfill(-(-len(digits) // 8) * 8)
    return ",".join(digits[start : start + 8] for start in range(0, len(digits), 8))


@dataclass(frozen=True)
class Command:
    """`words` run in the namespace of node `at` (or HUB). needs: what the kernel must have."""

    at: int
    words: tuple[str, ...]
    needs: str


@dataclass(frozen=True)
class Network:
    """Nodes of one owner. ValueError for a number of them that cannot be joined."""

    nodes: int
    owner: int  # process id
    congestion: str = "reno"  # TCP's congestion control between nodes

    def __post_init__(self) -> None:
        if not 2 <= self.nodes <= MOST_NODES:
            raise ValueError(f"{self.nodes} emulated nodes: use 2 to {MOST_NODES}")

    @property
    def interface(self) -> str:
        """The same in every node; at most 15 characters."""
        return f"zpp{self.owner}"

    @property
    def needs_hub(self) -> bool:
        return self.nodes > 2

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def port(self, node: int) -> str:
        """Return the hub's end of a node's link."""
        return f"zpp{self.owner}p{node}"

    def join(self, places: dict[int, int]) -> list[Command]:
        """Return commands that link the namespaces of the processes `places`, by node or HUB."""
        pair = f"link add {self.interface} type veth peer {self.interface} netns {places[1]}"
        made = self._through_hub(places) if self.needs_hub else [ip(0, pair)]
        for node in range(self.nodes):
            made += self._bring_up(node)
        return made

    def _through_hub(self, places: dict[int, int]) -> list[Command]:
        bridge = f"zpp{self.owner}b"
        made = [
            ip(HUB, f"link add {bridge} mtu {MTU} type bridge", BRIDGE),
            ip(HUB, f"link set {bridge} up", BRIDGE),
        ]
        for node in range(self.nodes):
            port, to = self.port(node), f"peer {self.interface} netns {places[node]}"
            made += [
                ip(HUB, f"link add {port} mtu {MTU} type veth {to}"),
                ip(HUB, f"link set {port} master {bridge} up", BRIDGE),
            ]
        return made

    def _bring_up(self, node: int) -> list[Command]:
        return [
            ip(node, "link set lo up", NET),
            ip(node, f"addr add {self.address(node)}/24 dev {self.interface}", NET),
            ip(node, f"link set {self.interface} mtu {MTU} up", NET),
            self.route(node),
        ]

    def route(self, node: int) -> Command:
        words = f"route change {SUBNET} dev {self.interface} congctl {self.congestion}"
        return ip(node, words, TCP)

    def ends(self) -> list[tuple[int, str]]:
        """Return where links begin and end: the node or HUB, and its interface."""
        nodes = range(self.nodes)
        hub = [(HUB, self.port(node)) for node in nodes] if self.needs_hub else []
        return [(node, self.interface) for node in nodes] + hub

    def limit(self, gbps: float | None, limited: bool) -> list[Command]:
        """Set every link's speed in gigabits per second; None takes the limits away.

        limited: whether there are limits now.
        """
        ends = self.ends()
        if gbps is None:
            return [tc(at, f"qdisc del dev {end} root") for at, end in ends if limited]
        return [tc(at, f"qdisc replace dev {end} root {bucket(gbps)}") for at, end in ends]


def bucket(gbps: float) -> str:
    """Return tc's token bucket for a link of `gbps`. ValueError for a speed that is none."""
    if not 0.001 <= gbps <= 1000:
        raise ValueError(f"a link of {gbps:g} Gb/s: use 0.001 to 1000, or max")
    per_second = gbps * 1e9 / 8
    burst = max(LEAST_BURST, int(per_second * BURST_SECONDS))
    return f"tbf rate {round(gbps * 1e6)}kbit burst {burst} limit {burst + QUEUE}"


def ip(at: int, words: str, needs: str = VETH) -> Command:
    return Command(at, ("ip", *words.split()), needs)


def tc(at: int, words: str, needs: str = TBF) -> Command:
    return Command(at, ("tc", *words.split()), needs)


FOLDER = "ZPP_LAB_IPROUTE"
ENTER = [sys.executable, "-m", "zpp_lab.tools.links.namespaces", "enter"]
PLACES = ("bin", "sbin", "usr/bin", "usr/sbin")
INSTALL = (
    "install iproute2 (apt install iproute2), or unpack it into a folder with bin/ and lib/ (as "
    f"experiments/speed/iproute.sh does) and set {FOLDER} or --iproute to it"
)


@dataclass(frozen=True)
class Tools:
    """Paths of `ip` and `tc`, and the folders of libraries that came along with them."""

    ip: str
    tc: str
    libraries: tuple[str, ...] = ()

    @classmethod
    def find(cls, folder: str | Path | None = None) -> Tools:
        """Look in `folder`, or in the one that the environment names, or on the path.

        EmulationError when one is missing: says what to install.
        """
        if not sys.platform.startswith("linux"):
            raise EmulationError("emulated nodes need Linux, for its network namespaces")
        given = folder or os.environ.get(FOLDER)
        if given and not Path(given).is_dir():
            raise EmulationError(f"{given}: folder not found; {INSTALL}")
        path = (
            os.pathsep.join(str(Path(given, place).absolute()) for place in PLACES)
            if given
            else None
        )
        if path is None:
            path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
        found = {name: shutil.which(name, path=path) for name in ("ip", "tc")}
        missing = [name for name, where in found.items() if where is None]
        if missing:
            where = f" in {given}" if given else ""
            raise EmulationError(f"{' and '.join(missing)} not found{where}: {INSTALL}")
        libraries = Path(given).glob("**/lib*.so*") if given else ()
        folders = sorted({str(path.parent.absolute()) for path in libraries})
        return cls(str(found["ip"]), str(found["tc"]), tuple(folders))

    def run(self, command: Command, pid: int) -> str:
        """Return what the command prints in the network namespace of process `pid`.

        EmulationError says what the kernel would need.
        """
        tool = {"ip": self.ip, "tc": self.tc}[command.words[0]]
        path = f"LD_LIBRARY_PATH={os.pathsep.join(self.libraries)}"
        loaded = ["env", path] if self.libraries else []  # for the tool alone
        words = [*ENTER, str(os.getpid()), str(pid), *loaded, tool, *command.words[1:]]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            found = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
            needs = NET if "not permitted" in found else command.needs
            raise EmulationError(f"`{' '.join(command.words)}` failed: {found}. It needs {needs}")
        return done.stdout
