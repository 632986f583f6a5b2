"""The compiled kernels as a wheel of its own, for machines without a compiler.

`zpp-lab build --wheel DIR` makes it, with or without a GPU. It holds the library and facts.json:
the digest of what was compiled, the architectures, and what it needs. Torch's stable ABI and the
CUDA runtime inside the library make one wheel serve every later torch and Python. The tag claims
no more than Linux on this processor: how old a libc may be depends on who compiled it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import re
import sysconfig
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch
from packaging.version import Version

from zpp_lab.files import parse_json

NAME = "zpp_lab_kernels"
LIBRARY, FACTS = f"{NAME}.so", "facts.json"
AGAIN = f"install a wheel of {NAME} again, with --force-reinstall --no-deps"


@dataclass(frozen=True)
class Facts:
    """What a wheel's library was built from and for."""

    version: str  # of the zpp_lab that it was made with
    digest: str  # of cuda/ and of how it is compiled (build.digest)
    archs: tuple[str, ...]  # as nvcc names them; the last also as PTX where its name is a number
    torch: str  # the oldest that it loads with
    cuda: str  # nvcc's

    def __post_init__(self) -> None:
        Version(self.version), Version(self.torch), Version(self.cuda)
        if not re.fullmatch("[0-9a-f]{64}", self.digest):
            raise ValueError(f"digest={self.digest!r} is not a SHA-256")
        if not self.archs or any(_arch(name) is None for name in self.archs):
            raise ValueError(f"archs={self.archs} are not architectures")

    def __str__(self) -> str:
        return f"wheel {NAME} {self.version} (digest {self.digest[:12]}, {', '.join(self.archs)})"

    def misfit(self, digest: str, capability: tuple[int, int]) -> str | None:
        """Say why it cannot serve these sources, this torch and a GPU of `capability`, or None."""
        if self.digest != digest:
            return f"it was built from other sources than this zpp_lab's (digest {digest[:12]})"
        if Version(torch.__version__).release < Version(self.torch).release:
            return f"it needs torch {self.torch} or newer, not {torch.__version__}"
        own, cuda = Version(self.cuda).major, torch.version.cuda
        if cuda is None or Version(cuda).major < own:
            return f"it needs a torch for CUDA {own} or newer, not {cuda or 'one without CUDA'}"
        if not self.runs_on(capability):
            return f"it has no code for compute capability {capability[0]}.{capability[1]}"
        return None

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether it has code for `capability`, which serves its major version on later GPUs
        (90a on 9.0 alone); PTX serves all later."""
        for name in self.archs:
            own, kind = _arch(name) or ((0, 0), "")
            same = own == capability if kind == "a" else own[0] == capability[0]
            if own <= capability and (same or (not kind and name == self.archs[-1])):
                return True
        return False


def _arch(name: str) -> tuple[tuple[int, int], str] | None:
    found = re.fullmatch(r"(\d+)(\d)([af]?)", name)
    return found and ((int(found[1]), int(found[2])), found[3])


def installed() -> tuple[Path, Facts] | None:
    """Return the library of the installed wheel; RuntimeError when the wheel is incomplete."""
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        read = parse_json(folder / FACTS, AGAIN)
        return folder / LIBRARY, Facts(**{**read, "archs": tuple(read["archs"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RuntimeError(f"{NAME} in {folder} is incomplete ({error}): {AGAIN}") from None


def write(library: Path, facts: Facts, folder: Path) -> Path:
    """Write a wheel into `folder`; the same library gives the same bytes."""
    tag = f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"
    stem = f"{NAME}-{facts.version}"
    info = f"{stem}.dist-info"
    terms = dict(_licenses())
    metadata = [
        "Metadata-Version: 2.4",
        f"Name: {NAME}",
        f"Version: {facts.version}",
        f"Summary: The CUDA kernels of zpp_lab, compiled with CUDA {facts.cuda}",
        *(f"License-File: {name}" for name in terms),
        f"Requires-Dist: torch>={facts.torch}",
        f"Requires-Dist: zpp_lab=={facts.version}",
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: zpp_lab", "Root-Is-Purelib: false", f"Tag: {tag}"]
    content = {
        f"{NAME}/__init__.py": b'"""What zpp_lab loads in place of compiling its kernels."""\n',
        f"{NAME}/{FACTS}": (json.dumps(asdict(facts), indent=1) + "\n").encode(),
        f"{NAME}/{LIBRARY}": library.read_bytes(),
        f"{info}/METADATA": "\n".join([*metadata, ""]).encode(),
        f"{info}/WHEEL": "\n".join([*wheel, ""]).encode(),
        **{f"{info}/licenses/{name}": text for name, text in terms.items()},
    }
    record = [
        f"{name},sha256={urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')}"
        f",{len(data)}"
        for name, data in content.items()
    ]
    content[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name)  # dated 1980
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{tag}.whl"
    path.write_bytes(packed.getvalue())
    return path


def _licenses() -> Iterator[tuple[str, bytes]]:
    """Yield the licenses of what is compiled into the library, where it is installed."""
    for package in ("zpp_lab", "nvidia-cutlass"):
        with contextlib.suppress(PackageNotFoundError):
            for file in files(package) or ():
                if "LICENSE" in file.name:
                    yield f"{package}-{file.name}", file.read_binary()
