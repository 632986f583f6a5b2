"""Compiles cuda/ once and keeps the library in a cache.

The key covers sources, flags, compiler, architectures and the version of torch, so a stale
library is never loaded. Compilation runs in a folder of its own and is moved into place in one
step. A lock of the operating system keeps two processes from doing the same work: it goes with
its holder's process, so it cannot be left behind, and waiting for it ends after a time limit.

`zpp-lab build` compiles ahead of time; ZPP_CUTLASS_INCLUDE names CUTLASS headers that do not
come from the `nvidia-cutlass` wheel, ZPP_CACHE_DIR another cache, ZPP_NVCC another compiler.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from zpp_lab.config.parser import Parser, whole
from zpp_lab.files import cuda_dir

ALL_ARCHS = ("80", "90a", "100")  # the last one also as PTX, for newer GPUs
TARGET = "0x020B000000000000"  # torch 2.11's stable ABI, and everything after it
KERNEL_FLAGS = ("-O3", "--fmad=false", "--expt-relaxed-constexpr", "--split-compile=0")
LOCK_SECONDS = 900.0


@dataclass(frozen=True)
class Toolchain:
    """What a build takes: the compiler, its version text, and CUTLASS's headers."""

    nvcc: str
    version: str
    cutlass: Path

    @classmethod
    def find(cls) -> Toolchain:
        """RuntimeError, naming the fix, when a part is missing."""
        nvcc = os.environ.get("ZPP_NVCC") or _find_nvcc()
        if nvcc is None:
            raise RuntimeError("nvcc is not on the PATH: install the CUDA toolkit, or set ZPP_NVCC")
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
        if version.returncode:
            raise RuntimeError(f"{nvcc} --version failed: {version.stderr.strip()}")
        return cls(nvcc, version.stdout, _cutlass_include())


def _find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(os.path.join(home, "bin", "nvcc"))


def _cutlass_include() -> Path:
    named = os.environ.get("ZPP_CUTLASS_INCLUDE")
    if named:
        place = Path(named)
    else:
        spec = importlib.util.find_spec("cutlass_library")
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError(
                "CUTLASS headers are missing: pip install 'zpp_lab[cuda]', or set "
                "ZPP_CUTLASS_INCLUDE to a folder that holds cutlass/cutlass.h"
            )
        place = Path(spec.submodule_search_locations[0]) / "source" / "include"
    if not (place / "cutlass" / "cutlass.h").is_file():
        raise RuntimeError(f"{place} holds no cutlass/cutlass.h: set ZPP_CUTLASS_INCLUDE")
    return place.resolve()


def local_arch() -> str:
    """The architecture of the current GPU, as nvcc names it."""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 0):
        raise RuntimeError(f"kernels need compute capability 8.0 or newer, not {major}.{minor}")
    return "90a" if (major, minor) == (9, 0) else f"{major}{minor}"


def arch_flags(archs: tuple[str, ...]) -> list[str]:
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    newest = archs[-1]
    if not newest.endswith("a"):
        flags.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    return flags


def library(archs: tuple[str, ...] | None = None, jobs: int = 0) -> Path:
    """The compiled library for these architectures (the local GPU's by default), built if absent.

    RuntimeError, naming the fix, when it cannot be built.
    """
    tools = Toolchain.find()
    archs = archs or (local_arch(),)
    path = place(tools, archs)
    if path.is_file():
        return path
    with _lock(cache_dir() / f"{path.parent.name}.lock"):
        if not path.is_file():
            with tempfile.TemporaryDirectory(dir=cache_dir()) as temporary:
                built = compile_library(tools, archs, Path(temporary), jobs)
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(built, path)
    return path


def place(tools: Toolchain, archs: tuple[str, ...]) -> Path:
    """Where the library of these tools and architectures is looked for."""
    return cache_dir() / _key(tools, archs) / "zpp_lab_kernels.so"


def cache_dir() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "zpp_lab"
    place = Path(os.environ.get("ZPP_CACHE_DIR", default))
    place.mkdir(parents=True, exist_ok=True)
    return place


def sources() -> hashlib._Hash:
    """A digest of cuda/'s files."""
    digest = hashlib.sha256()
    for path in _files("*.cu", "*.cuh", "*.cpp", "*.h"):
        name = path.relative_to(cuda_dir()).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest


def _files(*patterns: str) -> list[Path]:
    """Those of cuda/'s folders, in one order everywhere."""
    return sorted(path for pattern in patterns for path in cuda_dir().rglob(pattern))


def _key(tools: Toolchain, archs: tuple[str, ...]) -> str:
    digest = sources()
    cutlass = (tools.cutlass / "cutlass" / "version.h").read_bytes()
    parts = (tools.version, torch.__version__, *archs, *KERNEL_FLAGS, TARGET)
    digest.update("\0".join(parts).encode() + cutlass)
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"another process has been compiling kernels for {LOCK_SECONDS:.0f} s "
                        f"and holds {path}: end it, or set ZPP_CACHE_DIR"
                    ) from None
                time.sleep(0.2)
        yield


def compile_kernels(
    tools: Toolchain, archs: tuple[str, ...], out: Path, jobs: int = 0
) -> list[Path]:
    """Every .cu file → an object file in `out`, side by side."""
    flags = [*KERNEL_FLAGS, *arch_flags(archs)]
    sources = _files("*.cu")
    objects = [out / f"{s.stem}.o" for s in sources]
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        list(pool.map(lambda so: _compile(tools, flags, *so), zip(sources, objects, strict=True)))
    return objects


def compile_bindings(tools: Toolchain, out: Path) -> list[Path]:
    """Every .cpp file → an object file in `out`."""
    include = Path(torch.__file__).parent / "include"
    flags = ["-O2", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={TARGET}", "-isystem", str(include)]
    sources = _files("*.cpp")
    objects = [out / f"{s.stem}_cpp.o" for s in sources]
    for source, target in zip(sources, objects, strict=True):
        _compile(tools, flags, source, target)
    return objects


def compile_library(tools: Toolchain, archs: tuple[str, ...], out: Path, jobs: int = 0) -> Path:
    """cuda/ → a shared library in `out`, linked to this torch."""
    with ThreadPoolExecutor(1) as pool:
        bindings = pool.submit(compile_bindings, tools, out)
        objects = [*compile_kernels(tools, archs, out, jobs), *bindings.result()]
    lib = Path(torch.__file__).parent / "lib"
    libs = [n for n in ("torch", "torch_cpu", "torch_cuda", "c10") if (lib / f"lib{n}.so").exists()]
    target = out / "zpp_lab_kernels.so"
    _run([tools.nvcc, "-shared", "-o", str(target), *map(str, objects), "-L", str(lib)]
         + [f"-l{n}" for n in libs] + ["-Xlinker", "-rpath", "-Xlinker", str(lib)])  # fmt: skip
    return target


def _compile(tools: Toolchain, flags: list[str], source: Path, target: Path) -> None:
    base = [tools.nvcc, "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    includes = ["-I", str(cuda_dir()), "-I", str(tools.cutlass)]
    _run([*base, *flags, *includes, "-c", str(source), "-o", str(target)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\nfailed:\n{done.stderr[-4000:]}")


def main(argv: list[str] | None = None) -> int:
    """`zpp-lab build`: compile ahead of time. ValueError, naming the fix, when that cannot be."""
    parser = Parser(prog="zpp-lab build", description="Compile the CUDA kernels ahead of time.")
    parser.add_argument(
        "--arch", default="local", help="local (this GPU), all, or names such as 80,90a,100"
    )
    parser.add_argument(
        "--jobs", type=whole(0), default=0, help="compilers side by side; 0: all cores"
    )
    args = parser.parse_args(argv)
    if args.arch == "local":
        if not torch.cuda.is_available():
            raise ValueError(
                "torch sees no GPU here: say what to compile for, such as --arch 90a or --arch all"
            )
        archs = None
    else:
        archs = ALL_ARCHS if args.arch == "all" else tuple(args.arch.split(","))
        if wrong := [arch for arch in archs if not re.fullmatch(r"[89]\da?|1[0-2]\d[af]?", arch)]:
            raise ValueError(f"--arch {wrong[0]}: use local, all, or names such as 80,90a,100")
    start = time.monotonic()
    try:
        path = library(archs, args.jobs)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    print(f"{path}  ({time.monotonic() - start:.1f} s)")
    return 0
