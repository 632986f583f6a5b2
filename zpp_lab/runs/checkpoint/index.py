"""What a checkpoint is: a folder of safetensors files and an index. No torch is needed.

    checkpoints/step-00000100/
      rank-00000-0.safetensors ...   each rank's rows of each tensor, in up to four files a rank
      index.json                     every tensor's dtype and shape; which rows of it each file
                                     holds; the SHA-256 of every 16 MiB of them; digests of the
                                     run's settings and steps (`origin.py`); the index's SHA-256

Headers and places in a file follow from the index, so all is checked. The same state of the same
ranks is the same bytes. Tensors have dotted names: `weights.NAME`, `optimizer.KEY.NAME`,
`base.NAME` (marks of a frozen base), `kept.NAME` (node-replicated weights, where differences
travel), `memory.WIRE.NAME` (each rank's error-feedback residuals: [ranks, rows, width]),
`scaler.KEY`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from zpp_lab.runs.checkpoint.origin import Origin
from zpp_lab.runs.checkpoint.tensor_file import Place, layout

INDEX = "index.json"
FORMAT = "zpp_lab checkpoint 1"
BLOCK = 2**24  # bytes of a file's tensor that one hash speaks for
LAST_TO_READ_OLDER = "19cf7c4"

Kind = tuple[str, tuple[int, ...]]  # dtype, whole shape
Held = dict[str, tuple[int, int, list[str]]]  # of a file: tensor → first row, last row + 1, hashes


class DamagedError(ValueError):
    """A checkpoint does not hold what was written; one line that says where."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"checkpoint {self.path} is damaged ({self.why})"


class ForeignError(DamagedError):
    """A checkpoint among those of a run is another run's; it is passed over like a damaged one."""

    def __str__(self) -> str:
        return f"checkpoint {self.path} is of another run ({self.why})"


@dataclass(frozen=True)
class Shard:
    """Rows [first, last) of a tensor, in one file; a hash for each `BLOCK` bytes."""

    file: str
    place: Place
    first: int
    last: int
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint; its shards in the order of rows."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Index:
    step: int
    weights_only: bool
    tensors: dict[str, Stored]
    origin: Origin | None = None  # None: written before there were digests, or outside of a run


def index_text(
    step: int,
    weights_only: bool,
    kinds: Mapping[str, Kind],
    files: Mapping[str, Held],
    origin: Origin | None = None,
) -> str:
    """Return the text of index.json."""
    index = {
        "format": FORMAT,
        "step": step,
        "weights_only": weights_only,
        **({"run": asdict(origin)} if origin else {}),
        "tensors": {n: {"dtype": d, "shape": list(s)} for n, (d, s) in sorted(kinds.items())},
        "files": {
            file: {
                name: {"rows": [first, last], "sha256": hashes}
                for name, (first, last, hashes) in sorted(held.items())
            }
            for file, held in sorted(files.items())
        },
    }
    body = json.dumps(index, indent=1).removesuffix("\n}") + ',\n "sha256": "'
    return body + _ending(body)


def _ending(body: str) -> str:
    return f'{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def open_index(path: Path) -> Index:
    """Read a checkpoint's index, and compare each file's size and header with it.

    DamagedError when they are not what was written; ValueError for a checkpoint of another format.
    """
    check_format(path)
    with intact(path, INDEX):
        text = (path / INDEX).read_bytes().decode()
    cut = len(text) - len(_ending(""))
    if cut < 0 or text[cut:] != _ending(text[:cut]):
        raise DamagedError(path, f"{INDEX}: its SHA-256 differs")
    found = json.loads(text)
    if found["format"] != FORMAT:
        raise ValueError(f"{path} is a {found['format']}, and this zpp_lab reads {FORMAT}")
    kinds = {n: (t["dtype"], tuple(t["shape"])) for n, t in found["tensors"].items()}
    shards: dict[str, list[Shard]] = {name: [] for name in kinds}
    for file, held in found["files"].items():
        rows: dict[str, tuple[int, int]] = {n: tuple(entry["rows"]) for n, entry in held.items()}
        begin, places = layout({n: part_of(kinds[n], *rows[n]) for n in held})
        _check_file(path, file, begin, sum(p.nbytes for p in places.values()))
        for name, place in places.items():
            shards[name].append(Shard(file, place, *rows[name], tuple(held[name]["sha256"])))
    tensors = {
        n: Stored(*kind, tuple(sorted(shards[n], key=lambda s: s.first)))
        for n, kind in kinds.items()
    }
    origin = Origin(**found["run"]) if "run" in found else None
    return Index(found["step"], found["weights_only"], tensors, origin)


def part_of(kind: Kind, first: int, last: int) -> Kind:
    """Return dtype and shape of rows [first, last) of a tensor."""
    dtype, shape = kind
    return dtype, (last - first, *shape[1:]) if shape else ()


def _check_file(path: Path, file: str, begin: bytes, data: int) -> None:
    with intact(path, file):
        size = (path / file).stat().st_size
        if size != len(begin) + data:
            raise DamagedError(path, f"{file}: {size:,} bytes, not {len(begin) + data:,}")
        with (path / file).open("rb") as opened:
            if opened.read(len(begin)) != begin:
                raise DamagedError(path, f"{file}: its header differs from the index")


@contextmanager
def intact(path: Path, what: str) -> Iterator[None]:
    """Raise DamagedError where reading `what` fails, but not where this user may not read it."""
    try:
        yield
    except PermissionError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        text = "missing" if missing else getattr(error, "strerror", None) or "not as written"
        raise DamagedError(path, f"{what}: {text}") from None


def check_format(path: Path) -> None:
    """Raise ValueError when `path` is a checkpoint from before this format."""
    if path.suffix == ".pt" or (path / "whole.json").exists() or (path / ".metadata").exists():
        raise ValueError(
            f"{path} is a checkpoint from before safetensors; commit {LAST_TO_READ_OLDER} is the "
            "last that reads it: resume with that one, or start over (run.resume=false)"
        )


def listed(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first, damaged and older formats too."""
    found = [p for p in folder.glob("step-*") if p.is_dir() or p.suffix == ".pt"]
    return sorted(found, key=lambda p: p.stem)
