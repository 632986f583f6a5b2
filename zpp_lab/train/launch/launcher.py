"""One process a rank: starts them, or finds its place among those that somebody else started.

`engine=virtual` needs one process and runs right here. The others start nodes × gpus_per_node
processes on this machine (elastic launch) and watches them: when one dies, the others are ended
and its rank and traceback are reported. Under torchrun, or srun with one task a GPU, the
processes are there already, and each joins with the rank that its environment gives.

Ranks of our own are ended with this process, however it ends: the kernel kills them (Linux).
All ranks watch each other (`heartbeat.py`): a launcher sees processes that end, and no others.

A run's folder is held meanwhile (`files.py`): by the launcher, or by rank 0 of ranks that somebody
else started.

The trainer takes seconds to import; a process that only starts ranks does without.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import yaml

from zpp_lab.collectives import watchdog
from zpp_lab.config.compose import check_same_run, has_ended, run_dir
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.files import CONFIG, FAILURE, SUMMARY, at_work, hold, write_atomic
from zpp_lab.runs.metrics import Record, read_object
from zpp_lab.runs.provenance import oom_kills
from zpp_lab.runs.wandb.folder import read_summary, write_failure
from zpp_lab.train.footprint import StartUp
from zpp_lab.train.inputs import check_run
from zpp_lab.train.launch.cause import USER_ERROR, first_cause, lost_a_peer, mistake
from zpp_lab.train.launch.gpus import Placement, place, served, visible_gpus
from zpp_lab.train.launch.heartbeat import FAILED, LOST, Pulse, lost_line
from zpp_lab.train.launch.mps import PROGRAM, check_client
from zpp_lab.train.launch.place import (
    SHARE,
    check_place,
    die_with_parent,
    enter,
    patience,
    placed,
    prepare_graphs,
    see_own_gpus,
)
from zpp_lab.train.memory.advice import settled
from zpp_lab.train.memory.host import KILLED, check_host_memory
from zpp_lab.train.time_slice import JOB, UNFINISHED

_ELASTIC = "torch.distributed.elastic.multiprocessing.api"
_ALONE = "; engine=virtual runs in one process: start it without torchrun or srun"
_AGAIN = "the same command resumes from the newest checkpoint"
PULSES: list[Pulse] = []  # this process's, when it is a rank


class RankFailed(RuntimeError):
    """A rank ended the run; says which, and shows its traceback."""


def launch(config: Config, checked: bool = False) -> Record:
    """Train as `config` says, in as many processes as its engine needs; returns the summary. Holds
    the run's folder meanwhile; ValueError when another process has it. A process that joined as
    another rank than 0 gets an empty summary. checked: this process has asked `check_run` already,
    which ranks that somebody else started leave to this."""
    JOB.listen(run_dir(config))
    ranks_are_there = placed(os.environ)
    if config.engine.ranked and ranks_are_there:
        return join_watched(config)
    if has_ended(config):  # nothing will be written
        return run(config)
    with at_work(run_dir(config), patience(os.environ), _ALONE if ranks_are_there else ""):
        return train(config, checked)


def train(config: Config, checked: bool = False) -> Record:
    """Do `launch` in a process that holds the run's folder already, and is no rank."""
    if not has_ended(config):
        config = _settled(config)
    if config.engine.ranked:
        return start(config)
    if _on_cpu(config):
        check_host_memory(config)
    return run(config, checked=checked)


def _settled(config: Config) -> Config:
    """Choose a placement, where engine.place=auto leaves it to us, and print it."""
    config, line = settled(config)
    if line:
        print(line, flush=True)
    return config


def job(config: Config) -> Record:
    """Run one job of a batch system, or one rank of it, inside a Python that continues afterwards.
    A second job of the same run waits, and then finds it finished."""
    folder = run_dir(config)
    JOB.listen(folder)
    if config.engine.ranked and placed(os.environ):
        summary = launch(config)
        leave(at_exit=True)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        with hold(folder):
            summary = train(config)
    if why := queue_again(summary):
        _write_failure(folder, None, why, why)
        raise RankFailed(why)
    return summary


def queue_again(summary: Record) -> str:
    """Queue the job again where Slurm's warning stopped the run; returns why not, or ""."""
    return JOB.again() if summary.get("outcome") == UNFINISHED else ""


def run(
    config: Config, rank: int = 0, start_up: StartUp | None = None, checked: bool = False
) -> Record:
    """Call the trainer's `run`."""
    from zpp_lab.train import trainer

    return trainer.run(config, rank, start_up, checked)


# ---------------------------------------------------------------------- ranks of our own


def start(config: Config) -> Record:
    """Start every rank on this machine and wait for the run's end. ValueError for what a user can
    mend; RankFailed when a rank died."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    world, folder = config.cluster.world, run_dir(config)
    placement = _placement(config)
    folder.mkdir(parents=True, exist_ok=True)
    check_same_run(config, folder)
    kills = oom_kills()
    with tempfile.TemporaryDirectory() as temporary, served(placement) as where:
        file = Path(temporary, CONFIG)
        write_atomic(file, yaml.safe_dump(asdict(config), sort_keys=False))
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.2,
        )
        words = ("-m", "zpp_lab.train.launch.launcher", str(os.getpid()), str(file))
        logging.getLogger(_ELASTIC).setLevel(logging.CRITICAL)  # `_report` says it, and which rank
        try:
            with inherited(where.environment):
                elastic_launch(settings, sys.executable)(*words)
        except ChildFailedError as error:
            _report(error, folder, oom_kills() > kills)
    in_pieces = config.run.until is not None or config.run.piece_steps > 0 or JOB.warning
    if in_pieces and not (folder / SUMMARY).is_file():
        return {"outcome": UNFINISHED}
    return read_summary(folder / SUMMARY)


def _on_cpu(config: Config) -> bool:
    device = config.engine.device
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def _placement(config: Config) -> Placement:
    """Where the ranks sit on this machine's GPUs. ValueError where there are too few."""
    cluster, share = config.cluster, config.engine.share_gpus
    if _on_cpu(config):
        check_host_memory(config)
        if config.engine.device == "auto":
            note = f"no GPU here: {cluster.world} ranks on the CPU, over gloo"
            print(note, file=sys.stderr, flush=True)
        return Placement(cluster)
    if torch.cuda.device_count() >= cluster.world:
        return Placement(cluster)
    if torch.cuda.device_count() == 0:
        raise ValueError("torch finds no GPU: use engine.device=cpu, or engine=virtual")
    if share is not None:
        return place(cluster, visible_gpus(os.environ), share, SHARE)
    raise ValueError(
        f"the cluster has {cluster.world} ranks, but this machine has {torch.cuda.device_count()} "
        "GPUs: set cluster.nodes and cluster.gpus_per_node to this machine's, start a process a "
        f"GPU with torchrun or srun on every machine, or let nodes share GPUs with {SHARE}"
    )


@contextmanager
def inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Give the variables to processes that are started in the body."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _report(error: Any, folder: Path, out_of_memory: bool) -> None:
    """Raise what the rank that ended the run reported, and leave it in failure.json. out_of_memory:
    meanwhile the kernel has killed a process of this container for lack of memory."""
    rank, failure = first_cause(error.failures)
    message, text = failure.message, failure.message
    if isinstance(message, Mapping) and "lost" in message:  # who it was, seen by a rank that waited
        _write_failure(folder, message["lost"], str(message["why"]), str(message["message"]))
        raise RankFailed(str(message["message"]).partition(": ")[2]) from None
    if isinstance(message, Mapping):  # an exception that the rank could still write down
        text = message.get("extraInfo", {}).get("py_callstack") or message.get("message")
        message = message.get("message")
    if failure.exitcode == USER_ERROR:
        line = str(message).partition(": ")[2]
        _write_failure(folder, rank, line, str(text))
        raise ValueError(line) from None
    killed = failure.exitcode < 0
    how = failure.signal_name() if killed else f"exit code {failure.exitcode}"
    more = f"\n{_AGAIN[0].upper()}{_AGAIN[1:]}" if killed else ""
    if out_of_memory and failure.exitcode == -signal.SIGKILL:
        text, more = f"{text}. {KILLED}", ""
    _write_failure(folder, rank, how, str(text))
    raise RankFailed(f"rank {rank} ended the run ({how}):\n{text}{more}") from None


def _write_failure(folder: Path, rank: int | None, how: str, text: str) -> None:
    """Write failure.json unless rank 0 has written the cause already. Never raises."""
    seen: Record = {}
    with suppress(OSError, ValueError):  # a damaged one is replaced
        seen = read_object(folder / FAILURE)
    if seen and (rank == 0 or seen.get("outcome") != "crashed"):
        return
    outcome = "out_of_memory" if "OutOfMemoryError" in text or KILLED in text else "crashed"
    who = "" if rank is None else f"rank {rank}: "
    failure: dict[str, Any] = {"outcome": outcome, "error": f"{who}{how}", "rank": rank}
    failure |= {"step": seen.get("step"), "traceback": text, "rank_0": seen.get("error")}
    with suppress(OSError, ValueError):
        write_failure(folder, failure)


# ---------------------------------------------------------------------- inside a rank


def join(config: Config, start_up: StartUp) -> Record:
    """Run as one of the ranks that are there already."""
    enter(os.environ)
    _leave_errors_to_us(config)
    rank = connect(config)
    start_up.done("ranks meet")
    _watch(config, rank, os.environ.get("TORCHELASTIC_ERROR_FILE"))
    return run(config, rank, start_up)


def join_watched(config: Config) -> Record:
    """Do `join` without a launcher of ours: the ranks report failures to each other too."""
    import zpp_lab.train.trainer  # noqa: F401  # belongs to the imports, before ranks meet

    start_up = StartUp.of_process()
    enter(os.environ)
    _leave_errors_to_us(config)
    rank = connect(config)
    start_up.done("ranks meet")
    try:
        _check_together(config, rank)
        with _held_by_rank_0(config, rank) as own:
            return _run_watched(own, rank, start_up)
    except BaseException:
        traceback.print_exc()
        _end_now(1)


def _check_together(config: Config, rank: int) -> None:
    """Check on every rank whether the run can begin; if one refuses, print each mistake and end."""
    problem: str | None = None
    try:
        if not has_ended(config):
            check_run(config, tracked=rank == 0)
    except (OSError, ValueError) as error:
        problem = mistake(error)
        if problem is None:
            raise
    met: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(met, problem)
    if any(met):
        if problem is not None and met.index(problem) == rank:
            print(f"rank {rank}: {problem}", file=sys.stderr, flush=True)
        dist.barrier()  # it is printed: a launcher ends the others after the first
        _end_now(USER_ERROR)


@contextmanager
def _held_by_rank_0(config: Config, rank: int) -> Iterator[Config]:
    """Hold the run's folder on rank 0, if it is this run's; yield the settings, with a placement
    for engine.place=auto. Else every rank says why and ends here. Before the ranks watch each
    other, as that writes into the folder, which is another run's."""
    with ExitStack() as stack:
        answer: list[Any] = ["", config]  # why not, and the settings
        folder = run_dir(config)
        if rank == 0:
            try:
                check_same_run(config, folder)
                if not has_ended(config):
                    wait = min(patience(os.environ), config.engine.timeout_seconds / 2)
                    stack.enter_context(at_work(folder, wait))
                    answer[1] = _settled(config)
            except ValueError as error:
                answer[0] = str(error)
            except OSError as error:
                answer[0] = f"{error}; set run.dir to a writable folder"
        dist.broadcast_object_list(answer)
        if answer[0]:
            print(f"rank {rank}: {answer[0]}", file=sys.stderr, flush=True)
            dist.barrier()  # all have heard it: rank 0's end would cut off the others
            _end_now(USER_ERROR)
        place = answer[1].engine.place
        yield replace(config, engine=replace(config.engine, place=place))


def _run_watched(config: Config, rank: int, start_up: StartUp) -> Record:
    pulse = _watch(config, rank)
    try:
        return run(config, rank, start_up, checked=True)
    except BaseException as error:
        problem = mistake(error)
        text = traceback.format_exc() if problem is None else problem
        if lost_a_peer(text):
            pulse.missing(last_line(text))
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
        pulse.fail(text)
        os._exit(1 if problem is None else USER_ERROR)  # an orderly end would wait for the others


def _watch(config: Config, rank: int, for_launcher: str | None = None) -> Pulse:
    """End this rank when another one is lost, with a line on stderr or in the launcher's file."""

    def lost(other: int | None, why: str) -> None:
        try:  # a disk that fails, under a log too, neither hides the cause nor keeps this rank
            tell(other, why)
        finally:
            _end_now(1)

    def tell(other: int | None, why: str) -> None:
        line, first = lost_line(rank, watchdog.under_way()[1], other, why), why.splitlines()[0]
        if not first.startswith(FAILED):  # what that rank met may need another command
            line += f"; {_AGAIN}"
        if for_launcher is None:
            with suppress(OSError, ValueError):
                print(line, file=sys.stderr, flush=True)
            if rank == 0:
                _write_failure(run_dir(config), other, first, why)
        else:
            when = {"py_callstack": line, "timestamp": str(int(time.time()))}
            message = {"message": f"{LOST}: {line}", "extraInfo": when, "lost": other, "why": first}
            try:
                Path(for_launcher).write_text(json.dumps({"message": message}))
            except OSError:
                print(line, file=sys.stderr, flush=True)
        if other == rank:  # alone it can show where it hangs
            faulthandler.dump_traceback(all_threads=True)

    pulse = Pulse(config.engine.silence_seconds, lost, watchdog.under_way)
    watchdog.when_late(pulse.missing)
    PULSES.append(pulse)
    return pulse


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def _leave_errors_to_us(config: Config) -> None:
    """Where our watchdog sees every transfer: else torch's aborts the process at an error of NCCL,
    as of a peer that has ended, before anyone can say which wire waited for whom."""
    if config.engine.name == "fsdp":
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def connect(config: Config) -> int:
    """Meet the other ranks and return this one's number; ValueError for a wrong cluster."""
    check_place(os.environ, config.cluster)
    see_own_gpus(os.environ, config)
    cpu = config.engine.device == "cpu" or not torch.cuda.is_available()
    if not cpu:
        if config.engine.deterministic:  # cuBLAS reads it when it starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        prepare_graphs(os.environ)
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if PROGRAM in os.environ:
            torch.zeros(1, device="cuda")  # now CUDA has started
            check_client(os.environ, os.getpid())
    # NCCL's own watchdog comes after ours, which knows the wire's name.
    seconds = config.engine.timeout_seconds + (0 if cpu else 60)
    backend = "gloo" if cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return dist.get_rank()


def leave(at_exit: bool = False) -> None:
    """End this process if it is a rank, in one way or another: now, or where Python would."""
    if dist.is_available() and dist.is_initialized():
        try:
            for pulse in PULSES:
                pulse.leave()
            dist.barrier()
        except BaseException:
            traceback.print_exc()
            _end_now(1)
        if at_exit:
            atexit.register(_end_now, 0)
        else:
            _end_now(0)


def main(parent: str, path: str) -> None:
    """Run a rank's process, given its launcher's pid and the config's file."""
    from torch.distributed.elastic.multiprocessing.errors import record

    die_with_parent(int(parent))
    JOB.listen(None)
    import zpp_lab.train.trainer  # noqa: F401  # belongs to the imports, before ranks meet

    start_up = StartUp.of_process(int(parent))
    config = load(Config, yaml.safe_load(Path(path).read_text()))
    try:
        record(_join_or_say)(config, start_up)  # it notes the message, which the launcher tells
    except ValueError:
        _end_now(USER_ERROR)
    except BaseException:
        text = traceback.format_exc()
        if lost_a_peer(text):  # the launcher may find that one first, and end this process
            for pulse in PULSES:
                pulse.missing(last_line(text))
        print(text, file=sys.stderr, flush=True)
        _end_now(1)
    leave()


def _join_or_say(config: Config, start_up: StartUp) -> Record:
    """Do `join`; ValueError for every mistake of a user's."""
    try:
        return join(config, start_up)
    except Exception as error:
        problem = mistake(error)
        if problem is None:
            raise
        raise ValueError(problem) from error


def _end_now(code: int) -> NoReturn:
    """End this process at once: an orderly end would let the others fail, and exit, first. It
    would also abort where a thread is in a call of torch then, as gloo's groups may when they are
    torn down ("terminate called without an active exception")."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # they may lie on a full disk
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
