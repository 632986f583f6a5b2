"""Compiles cuda/ once and keeps the library in a cache.

The key covers sources, flags, compiler, architectures and the version of torch, so a stale
library is never loaded. Compilation runs in a folder of its own and is moved into place in one
step. A lock of the operating system keeps two processes from doing the same work: it goes with
its holder's process, so it cannot be left behind, and waiting for it ends after a time limit.

`zpp-lab build` compiles ahead of time; ZPP_CUTLASS_INCLUDE names CUTLASS headers that do not
come from the `nvidia-cutlass` wheel, ZPP_CACHE_DIR another cache, ZPP_NVCC another compiler.

None of this is needed where a wheel of the kernels is installed that fits (wheel.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from zpp_lab.codecs.kernels import wheel
from zpp_lab.config.parser import Parser, whole
from zpp_lab.files import cuda_dir

ALL_ARCHS = ("80", "90a", "100")  # the last one also as PTX, for newer GPUs
TORCH = "2.11"  # its stable ABI, and everything after it
TARGET = "0x{:02X}{:02X}000000000000".format(*map(int, TORCH.split(".")))
LINKED = ("torch_cpu", "torch_cuda")  # what the bindings call lies in these
KERNEL_FLAGS = ("-O3", "--fmad=false", "--expt-relaxed-constexpr", "--split-compile=0")
LOCK_SECONDS = 900.0


@dataclass(frozen=True)
class Toolchain:
    """What a build needs: the compiler, its version text, and CUTLASS's headers."""

    nvcc: str
    version: str
    cutlass: Path

    @classmethod
    def find(cls) -> Toolchain:
        """Find all parts; RuntimeError, naming the fix, when one is missing."""
        home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        found = shutil.which("nvcc") or shutil.which(os.path.join(home, "bin", "nvcc"))
        nvcc = os.environ.get("ZPP_NVCC") or found
        if nvcc is None:
            raise RuntimeError("nvcc is not on the PATH: install the CUDA toolkit, or set ZPP_NVCC")
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
        if version.returncode:
            raise RuntimeError(f"{nvcc} --version failed: {version.stderr.strip()}")
        return cls(nvcc, version.stdout, _cutlass_include())


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
        raise RuntimeError(f"{place} has no cutlass/cutlass.h: set ZPP_CUTLASS_INCLUDE")
    return place.resolve()


def local_arch() -> str:
    """Return the architecture of the current GPU, as nvcc names it."""
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


def serving() -> tuple[Path | None, str]:
    """Return the library that serves the current GPU, and what it is; None where it must be built.
    RuntimeError, naming the fix, when there is none and none can be built."""
    unfit, found = "", wheel.installed()
    if found is not None:
        why = found[1].misfit(digest(), torch.cuda.get_device_capability())
        if why is None:
            return found[0], str(found[1])
        unfit = f"{found[1]} does not fit: {why}; "
    archs = (local_arch(),)
    try:
        path = place(Toolchain.find(), archs)
    except RuntimeError as error:
        raise RuntimeError(f"{unfit}{error}; a wheel of {wheel.NAME} needs no compiler") from None
    if path.is_file():
        return path, f"{unfit}cache {path}"
    return None, f"{unfit}to be built when first used, or by `zpp-lab build`"


def library(archs: tuple[str, ...] | None = None, jobs: int = 0) -> Path:
    """Return the library compiled here for these architectures (default: the local GPU's), built if
    absent. RuntimeError, naming the fix, when it cannot be built."""
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
    """Return the path of the library of these tools and architectures."""
    return cache_dir() / _key(tools, archs) / "zpp_lab_kernels.so"


def cache_dir() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "zpp_lab"
    place = Path(os.environ.get("ZPP_CACHE_DIR", default))
    place.mkdir(parents=True, exist_ok=True)
    return place


def digest() -> str:
    """Hash the files of cuda/ and how they are compiled."""
    found = hashlib.sha256()
    for path in _files("*.cu", "*.cuh", "*.cpp", "*.h"):
        name = path.relative_to(cuda_dir()).as_posix()
        found.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    found.update("\0".join((*KERNEL_FLAGS, TARGET, *LINKED)).encode())
    return found.hexdigest()


def _files(*patterns: str) -> list[Path]:
    """List cuda/'s files that match, in one order everywhere."""
    return sorted(path for pattern in patterns for path in cuda_dir().rglob(pattern))


def _key(tools: Toolchain, archs: tuple[str, ...]) -> str:
    cutlass = (tools.cutlass / "cutlass" / "version.h").read_bytes()
    parts = "\0".join((digest(), tools.version, torch.__version__, *archs))
    return hashlib.sha256(parts.encode() + cutlass).hexdigest()[:20]


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
    """Compile every .cu file in parallel; returns the object files, in `out`."""
    flags = [*KERNEL_FLAGS, *arch_flags(archs)]
    sources = _files("*.cu")
    objects = [out / f"{s.stem}.o" for s in sources]
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        list(pool.map(lambda so: _compile(tools, flags, *so), zip(sources, objects, strict=True)))
    return objects


def compile_bindings(tools: Toolchain, out: Path) -> list[Path]:
    """Compile every .cpp file; returns the object files, in `out`."""
    include = Path(torch.__file__).parent / "include"
    flags = ["-O2", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={TARGET}", "-isystem", str(include)]
    flags += ["-Xcompiler", f"-fmacro-prefix-map={include}/="]
    sources = _files("*.cpp")
    objects = [out / f"{s.stem}_cpp.o" for s in sources]
    for source, target in zip(sources, objects, strict=True):
        _compile(tools, flags, source, target)
    return objects


def compile_library(tools: Toolchain, archs: tuple[str, ...], out: Path, jobs: int = 0) -> Path:
    """Compile cuda/ into a shared library in `out`, for any machine."""
    with ThreadPoolExecutor(1) as pool:
        bindings = pool.submit(compile_bindings, tools, out)
        objects = [*compile_kernels(tools, archs, out, jobs), *bindings.result()]
    return link(tools, objects, out)


def link(tools: Toolchain, objects: list[Path], out: Path) -> Path:
    """Link a library that needs torch's libraries by name only: where it is loaded, they are there.
    Empty libraries of these names stand in here, where a torch for CPUs lacks one of them."""
    empty, target = out / "empty.cpp", out / "zpp_lab_kernels.so"
    empty.touch()
    for name in (f"lib{name}.so" for name in LINKED):
        words = ["-cudart", "none", "-Xcompiler", "-fPIC", "-Xlinker", f"-soname={name}"]
        _run([tools.nvcc, "-shared", *words, str(empty), "-o", str(out / name)])
    libraries = ["-L", str(out), "-Xlinker", "--no-as-needed", *(f"-l{name}" for name in LINKED)]
    _run([tools.nvcc, "-shared", "-nodlink", "-o", str(target), *map(str, objects), *libraries])
    return target


def _compile(tools: Toolchain, flags: list[str], source: Path, target: Path) -> None:
    base = [tools.nvcc, "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    includes = ["-I", str(cuda_dir()), "-I", str(tools.cutlass)]
    for place in (cuda_dir(), tools.cutlass):  # errors name files, not this machine's folders
        includes += ["-Xcompiler", f"-fmacro-prefix-map={place}/="]
    _run([*base, *flags, *includes, "-c", str(source), "-o", str(target)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\nfailed:\n{done.stderr[-4000:]}")


def words() -> Parser:
    """Return the parser of `zpp-lab build`."""
    parser = Parser(prog="zpp-lab build", description="Compile the CUDA kernels ahead of time.")
    text = "local (this GPU; the default), all (the default of a wheel), or such as 80,90a,100"
    parser.add_argument("--arch", help=text)
    parser.add_argument("--jobs", type=whole(0), default=0, help="parallel compilers; 0: all cores")
    parser.add_argument(
        "--wheel", type=Path, metavar="DIR", help="write a wheel for machines without a compiler"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `zpp-lab build`. ValueError, naming the fix, when kernels cannot be compiled."""
    args = words().parse_args(argv)
    start = time.monotonic()
    if args.wheel and args.wheel.exists() and not args.wheel.is_dir():
        raise ValueError(f"--wheel {args.wheel}: not a folder; use an existing one")
    try:
        archs = _archs(args.arch or ("all" if args.wheel else "local"))
        facts = _facts(archs) if args.wheel else None
        path = None if args.arch or args.wheel else serving()[0]
        path = path or library(archs, args.jobs)
        if facts is not None:
            path = wheel.write(path, facts, args.wheel)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    size, seconds = path.stat().st_size / 1e6, time.monotonic() - start
    print(f"{path}  ({size:.1f} MB, {seconds:.1f} s)")
    return 0


def _archs(text: str) -> tuple[str, ...]:
    if text == "local":
        if not torch.cuda.is_available():
            raise ValueError(
                "torch finds no GPU: set what to compile for, such as --arch 90a or --arch all"
            )
        return (local_arch(),)
    archs = ALL_ARCHS if text == "all" else tuple(text.split(","))
    if wrong := [arch for arch in archs if not re.fullmatch(r"[89]\da?|1[0-2]\d[af]?", arch)]:
        raise ValueError(f"--arch {wrong[0]}: use local, all, or names such as 80,90a,100")
    return archs


def _facts(archs: tuple[str, ...]) -> wheel.Facts:
    release = re.search(r"release ([\d.]+)", Toolchain.find().version)
    if release is None:
        raise RuntimeError("nvcc --version names no release: set ZPP_NVCC to CUDA's own")
    try:
        version = importlib.metadata.version("zpp_lab")
    except importlib.metadata.PackageNotFoundError:  # a bare copy of the checkout
        project = cuda_dir().with_name("pyproject.toml").read_text(encoding="utf-8")
        version = tomllib.loads(project)["project"]["version"]
    return wheel.Facts(version, digest(), archs, TORCH, release[1])
