"""Kernels compiled on one machine for another of the same CPU, CUDA and torch's stable ABI.

    python experiments/reference/kernels.py make FOLDER   compile for H200 (90a), without a GPU
    python experiments/reference/kernels.py use FOLDER    put them where `zpp-lab build` would
    python experiments/reference/kernels.py save FOLDER   those that `zpp-lab build` compiled here

The file's name holds a digest of cuda/, so kernels of other sources are not taken. `use` encodes,
decodes and compares with plain torch to the bit; where that fails it takes the library away again
and ends with 1, and `zpp-lab build` is what remains.
"""

from __future__ import annotations

import lzma
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from zpp_lab.codecs import BlockCodec, kernels
from zpp_lab.codecs.kernels import build, reference
from zpp_lab.codecs.layout import Layout

ARCHS = ("90a",)
NEEDED = ("torch", "torch_cpu", "torch_cuda", "c10")  # a CPU build of torch lacks one of them


def main() -> int:
    command, folder = sys.argv[1], Path(sys.argv[2])
    file = folder / f"kernels-{build.sources().hexdigest()[:16]}.so.xz"
    return {"make": make, "use": use, "save": save}[command](file)


def make(file: Path) -> int:
    if file.is_file():
        return 0
    file.parent.mkdir(parents=True, exist_ok=True)
    tools = build.Toolchain.find()
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        objects = [*build.compile_kernels(tools, ARCHS, out), *build.compile_bindings(tools, out)]
        library = linked(tools, objects, out)
        for old in file.parent.glob("kernels-*"):
            old.unlink()
        file.write_bytes(lzma.compress(library.read_bytes(), preset=9))
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    return 0


def linked(tools: build.Toolchain, objects: list[Path], out: Path) -> Path:
    """A library that asks for torch's by name alone: where it is loaded, they are there already."""
    for name in NEEDED:
        empty = [
            "gcc",
            "-shared",
            "-fPIC",
            "-x",
            "c",
            "/dev/null",
            "-o",
            str(out / f"lib{name}.so"),
        ]
        subprocess.run([*empty, f"-Wl,-soname,lib{name}.so"], check=True)
    target = out / "zpp_lab_kernels.so"
    words = [tools.nvcc, "-shared", "-o", str(target), *map(str, objects), "-L", str(out)]
    subprocess.run(
        [*words, "-Xlinker", "--no-as-needed", *(f"-l{name}" for name in NEEDED)], check=True
    )
    return target


def save(file: Path) -> int:
    path = build.place(build.Toolchain.find(), (build.local_arch(),))
    file.write_bytes(lzma.compress(path.read_bytes(), preset=6))
    return 0


def use(file: Path) -> int:
    if not file.is_file():
        print(f"{file} is not there: kernels are built here", file=sys.stderr)
        return 1
    path = build.place(build.Toolchain.find(), (build.local_arch(),))
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.decompress(file.read_bytes()))
    try:
        kernels.configure("cuda")
        check()
    except (RuntimeError, OSError, ValueError) as error:
        path.unlink()
        print(f"{file} does not serve here, kernels are built: {error}", file=sys.stderr)
        return 1
    print(f"{file}: loaded, equal to plain torch")
    return 0


def check() -> None:
    """ValueError where kernels and plain torch give other bytes or values."""
    for bits in (8, 6, 4, 3, 2):
        codec = BlockCodec(bits=bits, block_size=64, symmetric=bits != 4)
        layout = Layout.build(["w"], [10_007], [codec])
        values = torch.randn(10_007, generator=torch.Generator().manual_seed(bits))
        sent = [torch.zeros(1, layout.nbytes, dtype=torch.uint8, device=d) for d in ("cuda", "cpu")]
        kernels.encode(layout, [values.cuda()], None, sent[0])
        reference.encode(layout, [values], None, sent[1])
        found = torch.empty(10_007, device="cuda")
        kernels.decode(layout, sent[0], [found])
        wanted = torch.empty(10_007)
        reference.decode(layout, sent[1], [wanted])
        if not (torch.equal(sent[0].cpu(), sent[1]) and torch.equal(found.cpu(), wanted)):
            raise ValueError(f"{bits} bits: kernels and plain torch differ")


if __name__ == "__main__":
    sys.exit(main())
