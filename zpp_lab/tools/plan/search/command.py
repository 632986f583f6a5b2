"""`zpp-lab plan --fastest`: from the words of a user to an answer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from rich.console import Console

from zpp_lab.config.compose import compose
from zpp_lab.config.load import setting_of
from zpp_lab.config.parser import one_link
from zpp_lab.config.schema import Config
from zpp_lab.tools.plan.cost.machine import load_machine
from zpp_lab.tools.plan.planner import NO_GPU, device_memory, host_memory
from zpp_lab.tools.plan.search.fastest import NothingFits, Problem, search
from zpp_lab.tools.plan.search.limits import LossLimit, read_limit
from zpp_lab.tools.plan.search.shown import WIDTH, as_dict, label, show
from zpp_lab.train.memory.advice import MOST_RANKS
from zpp_lab.train.memory.buffers import GIB
from zpp_lab.train.memory.outlook import Outlook


@dataclass(frozen=True)
class Wanted:
    """The options of `zpp-lab plan --fastest`, as typed."""

    machine: str | None
    link_gbps: str | None
    gpu_gib: float | None
    study: Path | None
    max_gap: float | None
    allow: str | None
    as_json: bool


def fastest_command(overrides: Sequence[str], wanted: Wanted) -> int:
    """Print the fastest plan. ValueError, with the way out, where there is none."""
    given = [w for w in overrides if setting_of(w) not in ("engine", "engine.name")]
    if any("deepspeed" in word for word in set(overrides) - set(given)):
        raise ValueError("engine=deepspeed: --fastest plans engine=fsdp: leave it out")
    config = compose([*given, "engine=fsdp"])
    problem = _problem(config, wanted)
    line = _Line(sys.stderr)
    try:
        answer = search(problem, say=line.say)
    except NothingFits as error:
        raise ValueError(_nothing_fits(problem, error)) from None
    finally:
        line.close()
    if wanted.as_json:
        print(json.dumps(as_dict(answer, overrides, config), indent=1))
    else:
        show(answer, overrides, config, Console(width=max(WIDTH, Console().width)))
    return 0


class _Line:
    """How far the search is: on a terminal one line, rewritten; elsewhere a line now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._live = stream, stream.isatty()
        self._pause, self._due = (0.2 if self._live else 20.0), 0.0
        self._ends = ("\r\x1b[K", "") if self._live else ("", "\n")

    def say(self, text: str) -> None:
        if (now := time.monotonic()) >= self._due:
            self._due = now + self._pause
            self._stream.write(f"searching: {text}".join(self._ends))
            self._stream.flush()

    def close(self) -> None:
        if self._live:
            self._stream.write(self._ends[0])
            self._stream.flush()


def _problem(base: Config, wanted: Wanted) -> Problem:
    if base.engine.place == "auto":
        raise ValueError(
            "engine.place=auto: --fastest plans with one placement: set engine.place to the one "
            "that `zpp-lab plan` prints without --fastest"
        )
    device, assumed = device_memory(wanted.gpu_gib or base.engine.gpu_gib)
    host = host_memory(base, wanted.gpu_gib)
    if wanted.machine is None:
        raise ValueError(
            "--fastest needs --machine: a file that `zpp-lab bench calibrate` wrote, or the name "
            "of one in conf/machine, such as h200"
        )
    machine, link = load_machine(wanted.machine), _link(base, wanted.link_gbps)
    untested = wanted.allow == "untested"
    limit = _limit(wanted)
    return Problem(
        base, machine, link, device, limit, assumed=assumed, untested=untested, host=host
    )


def _link(base: Config, text: str | None) -> float | None:
    """Gbit/s of a node; None where nodes are joined as the GPUs inside one are."""
    if base.cluster.nodes == 1 or text == "max":
        return None
    if text is None:
        raise ValueError(
            f"{base.cluster.nodes} nodes need --link-gbps, a node's speed to the others in "
            "Gbit/s, or max where links between nodes are as fast as inside one"
        )
    return one_link(text)


def _limit(wanted: Wanted) -> LossLimit | None:
    if wanted.study is not None:
        if wanted.allow == "untested":
            raise ValueError(
                "--allow untested is for a search without --study: with --study only measured "
                "recipes are chosen"
            )
        return read_limit(wanted.study, wanted.max_gap, wanted.allow == "undecided")
    for name in ("max_gap", "allow"):
        if getattr(wanted, name) not in (None, "untested"):
            raise ValueError(
                f"--{name.replace('_', '-')} works only with --study, a study's folder"
            )
    return None


def _nothing_fits(problem: Problem, error: NothingFits) -> str:
    closest = error.closest
    text = (
        f"no plan fits {problem.device / GIB:.1f} GiB a GPU{_host(problem.host)}; the closest "
        f"needs {closest.peak / GIB:.1f} GiB{_host(closest.host)} ({label(closest.candidate)})"
    )
    if error.others:
        who = "need --allow untested" if problem.limit is None else "the study does not allow"
        text += f", and {error.others:,} plans fit that {who}"
    found = _way_out(closest.candidate.config(problem.base), problem.device, problem.host)
    way = f"Add {found}" if found else "Use a smaller model, shorter sequences"
    larger = "--memory-gib" if problem.over(closest)[0] else "engine.host_gib"
    line = f"{text}. {way}, or set a larger {larger}"
    return f"{line}. {NO_GPU}" if problem.assumed else line


def _host(nbytes: int | None) -> str:
    return f" and {nbytes / GIB:.1f} GiB of host memory a rank" if nbytes else ""


def _way_out(config: Config, device: int, host: int | None) -> str | None:
    """Overrides with which `config` fits: smaller batches, as many tokens a step, more nodes."""
    train, cluster = config.train, config.cluster
    while train.batch_size % 2 == 0:
        train = replace(train, batch_size=train.batch_size // 2, micro_steps=2 * train.micro_steps)
        if Outlook.of(replace(config, train=train), device, host).fits:
            return f"train.batch_size={train.batch_size} train.micro_steps={train.micro_steps}"
    while 2 * cluster.world <= MOST_RANKS:
        cluster = replace(cluster, nodes=2 * cluster.nodes)
        if Outlook.of(replace(config, cluster=cluster), device, host).fits:
            return f"cluster.nodes={cluster.nodes}"
    return None
