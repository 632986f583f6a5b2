"""What this machine can do, and what to install for the rest.

`doctor()` prints one row a check. A row is `ok`, `absent` (something optional
that is not here) or `broken` (nothing works without it).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from zpp_lab.runs import provenance
from zpp_lab.runs.wandb import mode as wandb_mode

PYTHONS = ((3, 11), (3, 13))  # first and last
PROJECT = provenance.PACKAGE.parent / "pyproject.toml"  # there in a checkout only


@dataclass(frozen=True)
class Check:
    """One row: what was looked for, what was found, and what to do if it is not there."""

    name: str
    state: Literal["ok", "absent", "broken"]
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.state == "ok" or self.fix, f"{self.name} names no fix"


def doctor() -> int:
    """Print the table. Returns 0, or 1 when something that every run needs is broken."""
    rows = checks()
    print(table(rows))
    broken = [row.name for row in rows if row.state == "broken"]
    print(f"\nbroken: {', '.join(broken)}" if broken else "\nReady: `zpp-lab train` runs here.")
    return 1 if broken else 0


def checks() -> list[Check]:
    probes: list[Callable[[], Check]] = [
        python,
        zpp_lab,
        packages,
        torch,
        bytecode,
        cpu,
        cuda_device,
        nvcc,
        cutlass,
        kernels,
        compiler,
        distributed,
        peer_memory,
        emulated_nodes,
        shared_gpus,
        deepspeed,
        wandb,
    ]
    return [probe() for probe in probes] + extras()


def table(rows: list[Check]) -> str:
    """Return the rows in columns, each fix on a line of its own below its row."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.name:<{width}}  {row.state:<6}  {row.found}")
        if row.state != "ok":
            lines.append(f"{'':<{width}}          → {row.fix}")
    return "\n".join(lines)


def python() -> Check:
    version = sys.version_info
    first, last = PYTHONS
    good = first <= version[:2] <= last
    found = ".".join(map(str, version[:3]))
    fix = f"use Python {first[0]}.{first[1]} to {last[0]}.{last[1]}"
    return Check("python", "ok" if good else "broken", found, fix)


def zpp_lab() -> Check:
    version = provenance.versions()["zpp_lab"] or "not installed as a package"
    try:
        commit = provenance.commit()
    except ValueError as error:
        return Check("zpp_lab", "broken", version, str(error))
    return Check("zpp_lab", "ok", version + (f", commit {commit}" if commit else ""))


def packages() -> Check:
    """Return what every run needs, torch aside."""
    lacking = missing([line for line in requirements() if line.name != "torch"])
    if not lacking:
        return Check("packages", "ok", "all required packages are installed")
    return Check("packages", "broken", f"missing {', '.join(lacking)}", install())


def torch() -> Check:
    wanted = next((line for line in requirements() if line.name == "torch"), Requirement("torch"))
    try:
        import torch as library
    except (ImportError, OSError) as error:  # OSError: a shared library does not load
        return Check("torch", "broken", str(error), f"pip install '{wanted}'")
    good = wanted.specifier.contains(library.__version__, prereleases=True)
    built = f"CUDA {library.version.cuda}" if library.version.cuda else "CPU only"
    found = f"{library.__version__} ({built})"
    return Check("torch", "ok" if good else "broken", found, f"pip install '{wanted}'")


def bytecode() -> Check:
    """Look for torch's bytecode. Without it every process compiles torch again, for seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return Check("bytecode", "absent", "no torch", "install torch")
    if Path(importlib.util.cache_from_source(spec.origin)).is_file():
        return Check("bytecode", "ok", "of torch is there")
    folder = Path(spec.origin).parent
    if not sys.dont_write_bytecode and os.access(folder, os.W_OK):
        return Check("bytecode", "ok", "of torch is written when a process first imports it")
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else f"{folder} is read-only"
    return Check(
        "bytecode",
        "absent",
        f"of torch is not kept ({why}): each start takes seconds more",
        f"python -m compileall -q {folder}, once, as a user who may write there",
    )


def cpu() -> Check:
    memory = provenance.memory_bytes() / 2**30
    return Check(
        "cpu", "ok", f"{provenance.cores()} cores, {memory:.1f} GiB, {provenance.cpu_model()}"
    )


def cuda_device() -> Check:
    library = _torch()
    if library is not None and library.cuda.is_available():
        names = [
            "{} (sm_{}{})".format(name, *library.cuda.get_device_capability(index))
            for index, name in enumerate(provenance.gpus())
        ]
        return Check("cuda device", "ok", ", ".join(names))
    if shutil.which("nvidia-smi"):
        fix = "install a build of torch for CUDA, of a version that the driver supports"
        return Check("cuda device", "absent", "a driver is installed, but torch cannot use it", fix)
    fix = "no GPU is needed: the virtual engine runs any cluster on the CPU, more slowly"
    return Check("cuda device", "absent", "no GPU", fix)


def nvcc() -> Check:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = shutil.which("nvcc", path=f"{home}/bin") if home else None
    path = path or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        fix = "install the CUDA toolkit and set CUDA_HOME; only compiling the CUDA kernels needs it"
        return Check("nvcc", "absent", "no CUDA compiler", fix)
    release = re.search(r"release ([\d.]+)", provenance.output([path, "--version"]) or "")
    if release is None:
        return Check("nvcc", "absent", f"{path} does not work", "install the CUDA toolkit again")
    return Check("nvcc", "ok", f"CUDA {release[1]}, {path}")


def cutlass() -> Check:
    spec = importlib.util.find_spec("cutlass_library")  # of the nvidia-cutlass wheel
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "source/include/cutlass/cutlass.h").is_file():
            return Check("cutlass", "ok", f"headers {_version('nvidia-cutlass')}")
    fix = f"{install('cuda')}; only compiling the CUDA kernels needs it"
    return Check("cutlass", "absent", "no CUTLASS headers", fix)


def kernels() -> Check:
    """Return which library of CUDA kernels serves: a wheel's, the cache's, or a later build."""
    library = _torch()
    if library is None:
        return Check("kernels", "absent", "no torch", "install torch")
    from zpp_lab.codecs.kernels import build, wheel

    try:
        if not library.cuda.is_available():
            found = wheel.installed()
            what = f"no GPU for the {found[1]}" if found else "no GPU"
            return Check("kernels", "absent", what, "none are needed: falling back to PyTorch")
        return Check("kernels", "ok", build.serving()[1])
    except (RuntimeError, OSError) as error:  # OSError: no cache can be written
        return Check("kernels", "absent", "falling back to PyTorch", str(error))


def compiler() -> Check:
    """Return what engine.compile=true needs: torch writes C++ for the CPU and Triton for a GPU."""
    name = os.environ.get("CXX", "g++")
    path, library = shutil.which(name), _torch()
    if path is None:
        fix = "install g++, or set CXX to a C++ compiler; only engine.compile=true needs it"
        return Check("compile", "absent", f"no C++ compiler ({name})", fix)
    on_gpu = library is not None and library.cuda.is_available()
    if on_gpu and importlib.util.find_spec("triton") is None:
        fix = "pip install triton; only engine.compile=true needs it"
        return Check("compile", "absent", f"{path}, but no Triton for the GPU", fix)
    return Check("compile", "ok", path)


def distributed() -> Check:
    library = _torch()
    if library is None or not library.distributed.is_available():
        fix = "use a build of torch with distributed; the virtual engine needs none"
        return Check("distributed", "absent", "torch has no distributed package", fix)
    backends = [
        name
        for name in ("gloo", "nccl", "mpi")
        if getattr(library.distributed, f"is_{name}_available")()
    ]
    return Check("distributed", "ok", f"backends: {', '.join(backends) or 'none'}")


def peer_memory() -> Check:
    """Return what engine.transport=peer needs of one host: GPUs that read each other's memory."""
    library = _torch()
    count = library.cuda.device_count() if library is not None else 0
    fix = "not needed: engine.transport=auto uses process groups then"
    if count < 2:
        return Check("peer memory", "absent", "fewer than two GPUs", fix)
    reaches = library.cuda.can_device_access_peer
    apart = [
        f"{a}-{b}"
        for a, b in combinations(range(count), 2)
        if not (reaches(a, b) and reaches(b, a))
    ]
    if apart:
        return Check("peer memory", "absent", f"GPUs without peer access: {', '.join(apart)}", fix)
    return Check("peer memory", "ok", f"all {count} GPUs have peer access to each other")


def emulated_nodes() -> Check:
    """Return what `bench step` and `emulate` need for several nodes on one host."""
    from zpp_lab.tools.links.network import Tools
    from zpp_lab.tools.links.nodes import EmulatedNodes
    from zpp_lab.train.launch.processes import EmulationError

    try:
        with EmulatedNodes(2, Tools.find()) as nodes:
            nodes.limit(1.0)
    except EmulationError as error:
        fix = "only emulated nodes need them; bench step --nodes 1 runs without"
        return Check("emulated nodes", "absent", str(error), fix)
    return Check("emulated nodes", "ok", "network namespaces, veth pairs and tc's limits work")


def shared_gpus() -> Check:
    """Return what nodes need that share one host's GPUs."""
    from zpp_lab.train.launch.mps import CONTROL, find_control
    from zpp_lab.train.launch.processes import EmulationError

    try:
        found = find_control()
    except EmulationError:
        users = "--share-gpus, engine.share_gpus=mps and zpp-lab mps"
        fix = f"it comes with the driver; only {users} need it"
        return Check("shared GPUs", "absent", f"no {CONTROL}", fix)
    return Check("shared GPUs", "ok", f"MPS: {found}")


def deepspeed() -> Check:
    """Return what engine=deepspeed needs, without importing it: that takes seconds."""
    version = _version("deepspeed")
    if version is None:
        fix = f"{install('deepspeed')}; only engine=deepspeed needs it"
        return Check("deepspeed", "absent", "not installed", fix)
    quantizes = nvcc().state == "ok" and cuda_device().state == "ok"
    can = "ZeRO-3 and ZeRO++" if quantizes else "ZeRO-3; its quantizer needs a GPU and nvcc"
    return Check("deepspeed", "ok", f"{version}, {can}")


def wandb() -> Check:
    try:
        mode, why = wandb_mode.resolve("auto")
    except ValueError as error:  # WANDB_MODE holds a word that wandb does not know
        return Check("wandb", "absent", "no mode", str(error))
    if not wandb_mode.installed():
        fix = "pip install wandb; without it metrics.jsonl is still written, and can be sent later"
        return Check("wandb", "absent", f"auto means {mode}: {why}", fix)
    return Check("wandb", "ok", f"{_version('wandb')}, auto means {mode}: {why}")


def extras() -> list[Check]:
    """Return one row for each optional group of packages."""
    rows = []
    for extra in sorted(_groups()):
        lacking = missing(requirements(extra))
        fix = install(extra)
        found = f"missing {', '.join(lacking)}" if lacking else "installed"
        rows.append(Check(f"extra {extra}", "absent" if lacking else "ok", found, fix))
    return rows


def install(extra: str = "") -> str:
    """Return the command that installs the package's requirements."""
    what = f"[{extra}]" if extra else ""
    return f"pip install -e '.{what}'" if PROJECT.is_file() else f"pip install 'zpp_lab{what}'"


def requirements(extra: str | None = None) -> list[Requirement]:
    """Return what the package declares to need, always or for one extra, on this Python."""
    lines = _groups()[extra] if extra else _declared()[0]
    parsed = [Requirement(line) for line in lines]
    return [line for line in parsed if line.marker is None or line.marker.evaluate({"extra": ""})]


def missing(wanted: list[Requirement]) -> list[str]:
    """Return those that are not installed, or in a version that does not fit."""
    lacking = []
    for line in wanted:
        if line.name.replace("-", "_") == "zpp_lab":  # an extra that takes in other extras
            inner = [item for extra in sorted(line.extras) for item in requirements(extra)]
            lacking += missing(inner)
            continue
        version = _version(line.name)
        if version is None or not line.specifier.contains(version, prereleases=True):
            lacking.append(str(line))
    return list(dict.fromkeys(lacking))


def _groups() -> dict[str, list[str]]:
    return _declared()[1]


def _declared() -> tuple[list[str], dict[str, list[str]]]:
    """Requirements and extras, from a checkout's pyproject.toml or the installed package."""
    if PROJECT.is_file():
        content = tomllib.loads(PROJECT.read_text(encoding="utf-8")).get("project", {})
        return content.get("dependencies", []), content.get("optional-dependencies", {})
    return _installed()


def _installed() -> tuple[list[str], dict[str, list[str]]]:
    try:
        metadata = importlib.metadata.metadata("zpp_lab")
    except importlib.metadata.PackageNotFoundError:
        return [], {}
    needs: list[str] = []
    groups: dict[str, list[str]] = {name: [] for name in metadata.get_all("Provides-Extra") or []}
    for line in metadata.get_all("Requires-Dist") or []:
        named = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        plain = re.sub(r"(\s+and\s+|;\s*)extra\s*==\s*['\"][^'\"]+['\"]", "", line)
        (groups.setdefault(named[1], []) if named else needs).append(plain)
    return needs, groups


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch():  # type: ignore[no-untyped-def]
    try:
        import torch as library
    except (ImportError, OSError):
        return None
    return library
