"""A process's place among the ranks that torchrun or srun started, and whether it fits the cluster.

torchrun sets RANK, WORLD_SIZE and their kin; srun has names of its own for them, which `enter`
translates. A cluster's rank r sits on node r // gpus_per_node, so tasks must be laid out node by
node. One machine may stand for a cluster of several nodes: then only the number of ranks counts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, MutableMapping

from zpp_lab.config.schema import ClusterConfig, Config
from zpp_lab.train.launch.gpus import Placement, place, visible_gpus
from zpp_lab.train.launch.mps import PROGRAM
from zpp_lab.train.launch.ranks import shared_environment

Variables = Mapping[str, str]
_PR_SET_PDEATHSIG = 1
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_AFTER_RESTART = 120.0  # seconds; an NFS server frees a dead client's locks after some 90
SHARE = "engine.share_gpus=mps"


def placed(environment: Variables) -> bool:
    """Return whether somebody has started this process as one of several ranks."""
    torchrun = "RANK" in environment and "WORLD_SIZE" in environment
    return torchrun or _in_srun(environment)


def _in_srun(environment: Variables) -> bool:
    """Return whether this is `srun` with several tasks. A batch script has no step."""
    step = "SLURM_STEP_NUM_TASKS" in environment or "SLURM_STEP_ID" in environment
    return step and "SLURM_PROCID" in environment and _tasks(environment) > 1


def _tasks(environment: Variables) -> int:
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    return int(tasks) if tasks.isdigit() else 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this rank when its launcher ends, even by SIGKILL (Linux). Elastic
    launchers give ranks sessions of their own, so nothing else would end them then. parent: the
    launcher's pid, where it is known; if it is gone already, the rank ends here."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def enter(environment: MutableMapping[str, str]) -> None:
    """Give a task of srun torchrun's variables; nothing to do under torchrun."""
    if "RANK" not in environment and _in_srun(environment):
        environment.update(slurm_place(environment))


def prepare_graphs(environment: MutableMapping[str, str]) -> None:
    """Set what CUDA and NCCL must read before they start where CUDA graphs will hold transfers,
    unless the user has set it."""
    # NCCL would register the buffers of each captured transfer, with all ranks together, and keep
    # that as long as the graph. Graphs of steps are captured again and again, over memory that
    # torch frees in between.
    environment.setdefault("NCCL_GRAPH_REGISTER", "0")
    # A stream that waits for a link holds up others in its hardware queue: each has one of its own,
    # as far as there are.
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def slurm_place(environment: Variables) -> dict[str, str]:
    """Return torchrun's variables, from those of srun. ValueError names one that is missing."""
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    missing = [name for name in needed if not environment.get(name, "").isdigit()]
    if missing:
        raise ValueError(
            f"srun started this process, but {', '.join(missing)} is not set: start ranks with "
            "srun, and pass its environment on (--export=ALL)"
        )
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", "1")
    job = int(environment.get("SLURM_JOB_ID", "0"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(_tasks(environment)),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "GROUP_RANK": environment["SLURM_NODEID"],
        "GROUP_WORLD_SIZE": nodes,
        "LOCAL_WORLD_SIZE": str(-(-_tasks(environment) // int(nodes))),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_host(environment),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + job % 20000),
    }


def see_own_gpus(environment: MutableMapping[str, str], config: Config) -> None:
    """Leave a process the GPUs of its own node, where one machine stands for several nodes. Must
    run before CUDA starts; LOCAL_RANK becomes the place in the node. ValueError where there are too
    few GPUs, or MPS is asked for and nobody runs it."""
    engine, cluster = config.engine, config.cluster
    if int(environment.get("GROUP_WORLD_SIZE", "1")) > 1 or cluster.nodes == 1:
        return
    visible = visible_gpus(environment) if engine.share_gpus and engine.device != "cpu" else ()
    if visible:
        placed = place(cluster, visible, engine.share_gpus, SHARE)
        if placed.share is not None:
            _share(environment, placed)
            return
    if engine.name == "deepspeed" and engine.emulate_nodes:  # it takes the GPUs it sees for a node
        node, each = _enter_node(environment, cluster), cluster.gpus_per_node
        listed = environment.get("CUDA_VISIBLE_DEVICES")
        names = listed.split(",") if listed is not None else list(map(str, range(cluster.world)))
        if listed != "":  # none at all: a run on the CPU
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[node * each : (node + 1) * each])


def _share(environment: MutableMapping[str, str], placed: Placement) -> None:
    if placed.share == "mps" and PROGRAM not in environment:
        raise ValueError(
            f"{SHARE}, but MPS is not running for these processes: start them with `zpp-lab "
            "train` alone, or set engine.share_gpus=time-slices"
        )
    node = _enter_node(environment, placed.cluster)
    environment.update(shared_environment(placed, node, environment))


def _enter_node(environment: MutableMapping[str, str], cluster: ClusterConfig) -> int:
    """Give a rank its place in its node, and return the node."""
    node, local = divmod(int(environment["RANK"]), cluster.gpus_per_node)
    environment["LOCAL_RANK"] = str(local)
    environment["LOCAL_WORLD_SIZE"] = str(cluster.gpus_per_node)
    return node


def _first_host(environment: Variables) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    try:
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
        return shown.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise ValueError(
            "MASTER_ADDR is not set and scontrol does not name the job's first node: set "
            "MASTER_ADDR to the host of rank 0"
        ) from None


def patience(environment: Variables) -> float:
    """Return the seconds to wait for a folder that another process holds: some in a job that was
    started again, as its former start may be ending, or a lost node's lock remain."""
    counts = [environment.get(name, "") for name in _RESTARTS]
    return _AFTER_RESTART if any(c.isdigit() and int(c) > 0 for c in counts) else 0.0


def check_place(environment: Variables, cluster: ClusterConfig) -> None:
    """ValueError, naming the fix, when the processes that were started are not the cluster's."""
    world, shape = int(environment["WORLD_SIZE"]), f"{cluster.nodes} × {cluster.gpus_per_node}"
    if world != cluster.world:
        raise ValueError(
            f"{world} processes were started, but cluster.nodes={cluster.nodes} × "
            f"cluster.gpus_per_node={cluster.gpus_per_node} needs {cluster.world}: change either"
        )
    machines = int(environment.get("GROUP_WORLD_SIZE", "1"))
    if machines == 1:
        return
    if machines != cluster.nodes:
        raise ValueError(
            f"the processes run on {machines} machines, but cluster.nodes={cluster.nodes}: set "
            f"cluster.nodes={machines} cluster.gpus_per_node={world // machines}"
        )
    rank, local = int(environment["RANK"]), cluster.gpus_per_node
    found = int(environment.get("GROUP_RANK", rank // local)), int(environment["LOCAL_RANK"])
    if found != divmod(rank, local):
        raise ValueError(
            f"rank {rank} is task {found[1]} of machine {found[0]}, but in a cluster of {shape} "
            f"it is {rank % local} of {rank // local}: start {local} tasks on every machine, in "
            f"blocks (srun --ntasks-per-node={local} --distribution=block)"
        )
