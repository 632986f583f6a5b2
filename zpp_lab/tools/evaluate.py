"""Held-out loss and perplexity of runs and of folders for transformers, on the same tokens.

A run is measured with its master weights, with the weights that its wire brings, and rounded with
any codec. The same weights have other losses in bf16 than in fp32, and by transformers' decoder
than by ours: a row says how it was computed, and `dtype` makes all the same.

A folder's packed weight is unpacked by the first forward, in the dtype of its scales. A run in bf16
rounds each weight to bf16 after decoding, so a folder with fp32 scales is rounded after unpacking:
never its scales, nor buffers such as rotary frequencies (as `.to(torch.bfloat16)` would).

`check_comparable` refuses models with another tokenizer, and models that see the tokens to predict.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zpp_lab.collectives.recipe import DTYPES
from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.data import DataConfig
from zpp_lab.config.parser import check_own
from zpp_lab.config.schema import Config, EngineConfig
from zpp_lab.data import PackedData, TokenData, open_data
from zpp_lab.data.prepare import TOKENIZER
from zpp_lab.data.tokenizer import check_folder, open_outside
from zpp_lab.engines.build import pick_device
from zpp_lab.files import CONFIG, below, missing, text_table, write_atomic
from zpp_lab.models import build_model
from zpp_lab.models.llama import Llama
from zpp_lab.models.loss import counted, mean_loss, token_scores
from zpp_lab.models.start import Start, fill, materialize, whole
from zpp_lab.runs.checkpoint.read import SavedWeights
from zpp_lab.tools.export.card import RECORD, rounded_to
from zpp_lab.tools.export.model import MergedWeights, open_run
from zpp_lab.tools.export.wire import WireWeights, codec_text, parse_codec
from zpp_lab.train.evaluation import Heldout, open_heldout, perplexity
from zpp_lab.train.resume import check_reads, warn_of_change


def check_comparable(
    model: Any, path: Path, source: Path, data: DataConfig, window: Tensor
) -> None:
    """Raise ValueError when the model in `path` cannot read the held-out tokens of the run
    `source`, or cannot be asked for them. window: int64 [1, T], some of those tokens."""
    own = open_outside(data).file if data.tokenizer == "hf" else source / TOKENIZER
    fix = f"set --data to a run with that tokenizer in place of {source}"
    check_folder(path, None if data.tokenizer == "bytes" else own, fix)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < window.shape[1]:
        raise ValueError(
            f"{path} supports {limit} positions, but the windows of {source} have "
            f"{window.shape[1]}: set --data to a run with data.seq_len={limit} or less"
        )
    if _sees_ahead(model, window):
        raise ValueError(
            f"{path} is not a causal language model: its logits depend on the tokens to predict"
        )


@torch.no_grad()
def _sees_ahead(model: Any, window: Tensor) -> bool:
    """Whether another last token changes what the model says before it, by more than rounding."""
    first = window[:, : min(16, window.shape[1])]
    if first.shape[1] < 2:
        return False
    other = first.clone()
    other[:, -1] = torch.where(first[:, -1] == 0, 1, 0)
    a, b = (model(input_ids=t, use_cache=False).logits[:, :-1].float() for t in (first, other))
    return bool((a - b).abs().max() > 0.05 * a.std())


def load_folder(path: Path, dtype: torch.dtype | None = None) -> Any:
    """Return the model in `path` on the CPU, in evaluation mode.

    Packed weights are unpacked, and of a folder that we quantized they are those that training
    computed with. dtype: what it computes in, whatever the weights were rounded to; None: as the
    folder says, or as training did. ValueError when it cannot be loaded, or lacks weights.
    """
    model = _whole_model(path).eval()
    own = folder_record(path)
    _unpack(model)
    if own:
        _round(model, DTYPES[rounded_to(own["dtype"], own["computed_in"])])
    if dtype is not None:
        _round(model, dtype)
    return model


def folder_record(path: Path) -> dict[str, Any]:
    """Return what a folder that we quantized says of itself; of another one nothing."""
    file = path / RECORD
    if not file.is_file():
        return {}
    try:
        found = dict(json.loads(file.read_text(encoding="utf-8")))
        if {found["dtype"], found["computed_in"]} <= set(DTYPES) and isinstance(found["run"], dict):
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"{file} does not record how the folder's weights were made: export the run again"
    )


def _whole_model(path: Path) -> Any:
    """Fail on missing weights, which transformers would draw at random."""
    try:
        import transformers
    except ImportError:
        raise ValueError(f"{path} is a model for transformers: pip install 'zpp_lab[hf]'") from None
    library: Any = transformers
    try:
        with _no_progress_bars():
            made = library.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        model, found = made
    except Exception as error:  # of several libraries; an absent package for a quantized one too
        shown = str(error).strip().partition("\n")[0]  # some go on to list every model there is
        raise ValueError(
            f"{path}: transformers cannot load it ({type(error).__name__}: {shown}); download it "
            "again, or install a release of transformers that supports it"
        ) from None
    for what, key in (("missing", "missing_keys"), ("of another shape", "mismatched_keys")):
        names = sorted(str(name) for name in found[key])
        if names:
            raise ValueError(f"{path}: {len(names)} tensors {what}: {', '.join(names)}")
    return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide tqdm's bars in transformers and compressed-tensors, which has no switch."""
    from tqdm import tqdm

    made = tqdm.__init__

    def hidden(self: Any, *args: Any, **settings: Any) -> None:
        made(self, *args, **{**settings, "disable": True})

    tqdm.__init__ = hidden  # type: ignore[method-assign]
    try:
        yield
    finally:
        tqdm.__init__ = made  # type: ignore[method-assign]


@torch.no_grad()
def _unpack(model: Any) -> None:
    if getattr(model.config, "quantization_config", None) is None:
        return
    with _no_progress_bars():
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)


def _round(model: Any, dtype: torch.dtype) -> None:
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(dtype)


_SHORT = {str(t).removeprefix("torch."): name for name, t in DTYPES.items()}


@dataclass(frozen=True)
class Row:
    """One model on the held-out tokens. heldout_loss: nats a token; perplexity: e to its power. Of
    a reward model: nats a pair, and no perplexity; `tokens` are the texts of its pairs."""

    path: str
    recipe: str  # empty for a folder that no run is behind
    seed: int | None
    step: int | None
    weights: str  # master (rounded to train.param_dtype), wire, nearest CODEC, or transformers
    computed_by: str  # whose model: zpp_lab or transformers
    dtype: str  # of what it computes in
    heldout_loss: float
    perplexity: float | None
    tokens: int
    heldout_hash: str  # equal ones mean that losses can be compared
    heldout_accuracy: float  # the share of tokens that are predicted, or of pairs, 0 to 1
    heldout_bits_per_byte: float | None  # None where the tokenizer does not tell bytes of text


def evaluate(
    paths: Sequence[Path],
    data: Path | None = None,
    codecs: Sequence[CodecConfig] = (),
    tokens: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
) -> list[Row]:
    """Measure every run and folder in `paths`, in their order.

    data: the run whose held-out tokens to take; None: the first run in `paths`. codecs: runs are
    also measured with their master weights rounded to nearest so. tokens: in place of the run's
    train.eval_tokens. dtype: fp32 or bf16, which all compute in, with the weights that they have
    in train.param_dtype or in their folder; None: each as it was trained, or as its folder says.
    In fp32 equal weights have equal losses, to 1e-8 nats on the CPU, whoever computes. ValueError
    for what is neither a run nor a folder, and for a model that reads other tokens.
    """
    for path in (*paths, *([data] if data else [])):
        if not path.is_dir():
            raise ValueError(
                f"{path}: {missing(path)}; use a run's folder, or a model folder of transformers"
            )
    for path in paths:
        if not _is_run(path) and not (path / "config.json").is_file():
            inside = below(path, CONFIG) or below(path, f"*/{CONFIG}") or below(path, "config.json")
            raise ValueError(
                f"{path} is neither a run (config.yaml) nor a model (config.json){inside}; use "
                "one of them"
            )
    if codecs and not any(map(_is_run, paths)):
        raise ValueError(
            "--codec rounds the master weights of runs, but no run is given; add "
            "one, or leave --codec out"
        )
    source = data or next((p for p in paths if _is_run(p)), None)
    if source is None:
        raise ValueError("no run is given: set --data RUN, whose held-out tokens are used")
    if dtype not in (None, "fp32", "bf16"):
        raise ValueError(f"--dtype {dtype}: use fp32 or bf16")
    bench = Bench.of(source, tokens, device, dtype)
    measured = [
        _run_rows(p, bench, codecs) if _is_run(p) else [_folder_row(p, bench)] for p in paths
    ]
    return [row for rows in measured for row in rows]


@dataclass(frozen=True)
class Bench:
    """The held-out tokens of one run, on one device."""

    source: Path
    data: DataConfig
    tokens: TokenData | PackedData
    heldout: Heldout
    device: torch.device
    dtype: torch.dtype | None

    @classmethod
    def of(cls, source: Path, tokens: int | None, device: str, dtype: str | None) -> Bench:
        if tokens is not None and tokens < 1:
            raise ValueError(f"--tokens {tokens}: use 1 or more")
        config, _ = open_run(source)
        if tokens is not None:
            config = replace(config, train=replace(config.train, eval_tokens=tokens))
        data = open_data(config.data)
        check_reads(source, data)
        warn_of_change(source, data)
        where = pick_device(EngineConfig(device=device))
        heldout = open_heldout(config, data)
        kind = DTYPES[dtype] if dtype else None
        return cls(source, config.data, data, heldout, where, kind)

    @property
    def count(self) -> int:
        """Held-out tokens that count."""
        return sum(counted(y) for _, y in self.heldout.batches)

    def model(self, path: Path, config: Config, saved: SavedWeights) -> Any:
        """Return the run's model on the device, in its compute dtype, without weights."""
        rows = saved.shapes.get("embed.weight", (self.tokens.vocab_size,))[0]
        model = build_model(config.model, config.model.vocab_size or rows, "meta")
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        if shapes != saved.shapes:
            raise ValueError(
                f"the checkpoint in {path} is of another model than the run's "
                "config.yaml; restore either from a copy"
            )
        materialize(model, self.device)
        for p in model.parameters():
            p.data = p.data.to(self.dtype or WireWeights(config, saved).dtype)
        return model.eval()

    def fill(self, model: Any, read: Callable[..., Tensor], seed: int) -> None:
        """Fill in weights as `read(name, device)` gives them, whole."""
        fill(model, _Saved(model, seed, partial(read, device=self.device)), whole, lambda p: p)

    @torch.no_grad()
    def scores(self, model: Any) -> Tensor:
        """Score every held-out token that counts: fp32 [2, tokens], see `token_scores`."""
        pairs = ((x.to(self.device), y.to(self.device)) for x, y in self.heldout.batches)
        return torch.cat([token_scores(model, x, y).cpu() for x, y in pairs], 1)

    def loss(self, model: Any) -> float:
        return mean_loss(self.scores(model)[0])

    def row(self, path: Path, weights: str, model: Any, scores: Tensor, **run: Any) -> Row:
        of = {"recipe": "", "seed": None, "step": None, **run}
        loss = mean_loss(scores[0])
        ours = isinstance(model, Llama)
        return Row(
            path=str(path),
            **of,
            weights=weights,
            computed_by="zpp_lab" if ours else "transformers",
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            heldout_loss=loss,
            perplexity=None if self.heldout.pairs else perplexity(loss),
            tokens=self.count,
            heldout_hash=self.heldout.hash,
            heldout_accuracy=self.heldout.accuracy(scores)["heldout_accuracy"],
            heldout_bits_per_byte=self.heldout.per_byte(scores).get("heldout_bits_per_byte"),
        )


def _is_run(path: Path) -> bool:
    return (path / CONFIG).is_file()


def _run_rows(path: Path, bench: Bench, codecs: Sequence[CodecConfig]) -> list[Row]:
    config, saved = open_run(path)
    _check_tokens(path, config.data, bench)
    check_reads(path, bench.tokens)
    model = bench.model(path, config, saved)
    of = {"recipe": config.recipe.name, "seed": config.seed, "step": saved.step}
    rows = []
    for weights, read in _kinds(config, saved, codecs):
        bench.fill(model, read, config.seed)
        rows.append(bench.row(path, weights, model, bench.scores(model), **of))
    return rows


def _kinds(
    config: Config, saved: SavedWeights, codecs: Sequence[CodecConfig]
) -> list[tuple[str, Callable[..., Tensor]]]:
    """What is measured of a run, and how to read each parameter of it: by name and device."""
    master = WireWeights(config, saved)
    kinds: list[tuple[str, Callable[..., Tensor]]] = [("master", master.source)]
    if master.quantized:
        kinds.append(("wire", master.decoded))
    if isinstance(saved, MergedWeights) and (wired := saved.wired()) is not None:
        kinds.append(("wire", WireWeights(config, wired).source))
    for codec in codecs:
        kinds.append((f"nearest {codec_text(codec)}", WireWeights(config, saved, codec).decoded))
    return kinds


def _check_tokens(path: Path, data: DataConfig, bench: Bench) -> None:
    """Losses over different tokens cannot be compared."""
    keys = ["tokenizer", "tokenizer_path", "vocab_size", "pairs"]
    if data.tokenizer == "bpe":  # trained on its corpus
        keys += ["name", "path", "subset", "split", "column", "max_bytes", "heldout_every"]
    differing = [k for k in keys if getattr(data, k) != getattr(bench.data, k)]
    if differing:
        raise ValueError(
            f"{path} reads other tokens than {bench.source}: data.{differing[0]} is "
            f"{getattr(data, differing[0])!r}, not {getattr(bench.data, differing[0])!r}; evaluate "
            "them one by one"
        )


class _Saved(Start):
    """Weights as `read` gives them, whole; buffers as the model starts with them."""

    def __init__(self, model: nn.Module, seed: int, read: Callable[[str], Tensor]) -> None:
        self.read = read
        buffers = any(True for _ in model.named_buffers())
        self.start: Start | None = model.start(seed) if buffers else None  # type: ignore[operator]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return self.read(name)[first:last]

    def buffer(self, name: str) -> Tensor | None:
        return self.start.buffer(name) if self.start else None


def _folder_row(path: Path, bench: Bench) -> Row:
    if bench.data.pairs:
        raise ValueError(
            f"{path}: only runs are measured on pairs of task=reward; set --data to a run on text"
        )
    model = load_folder(path, bench.dtype).to(bench.device)
    own = model.config.get_text_config().vocab_size
    if own < bench.tokens.vocab_size:
        raise ValueError(
            f"{path} has {own} tokens, {bench.source} has {bench.tokens.vocab_size}: their "
            "tokenizers differ; set --data to a run with the same tokenizer"
        )
    window = bench.heldout.batches[0][0][:1].to(bench.device)
    check_comparable(model, path, bench.source, bench.data, window)
    scores = bench.scores(lambda x: model(input_ids=x, use_cache=False).logits)
    return bench.row(path, "transformers", model, scores, **folder_record(path).get("run", {}))


def evaluate_command(
    paths: Sequence[Path],
    data: Path | None,
    codecs: Sequence[str],
    tokens: int | None,
    device: str,
    out: Path | None,
    dtype: str | None = None,
) -> int:
    """Run `zpp-lab evaluate`: print a table, and write a file."""
    if out is not None and out.suffix not in (".csv", ".json"):
        raise ValueError(f"{out}: use a file that ends with .csv or .json")
    if out is not None:
        check_own("--out", out, "heldout_bits_per_byte")
    rows = evaluate(paths, data, [parse_codec(c) for c in codecs], tokens, device, dtype)
    print(table(rows))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_rows(rows, out)
        print(f"\nwritten: {out}")
    return 0


def table(rows: Sequence[Row]) -> str:
    """Return a table for a terminal; "from the first" is the distance from the first row."""
    names = ["model", "weights", "computed", "step"]
    names += ["held-out loss", "perplexity", "from the first", "accuracy", "bits a byte"]
    cells = [
        [
            row.path,
            row.weights,
            _how(row),
            "" if row.step is None else str(row.step),
            f"{row.heldout_loss:.5f}",
            "" if row.perplexity is None else f"{row.perplexity:.4f}",
            f"{row.heldout_loss - rows[0].heldout_loss:+.5f}",
            f"{row.heldout_accuracy:.2%}",
            "" if row.heldout_bits_per_byte is None else f"{row.heldout_bits_per_byte:.4f}",
        ]
        for row in rows
    ]
    what = "texts of held-out pairs" if rows[0].perplexity is None else "held-out tokens"
    text = f"{text_table(names, cells, left=3)}\n\n{rows[0].tokens:,} {what}"
    return f"{text}{_unlike(rows)}"


def _how(row: Row) -> str:
    return f"{row.computed_by} {_SHORT.get(row.dtype, row.dtype)}"


def _unlike(rows: Sequence[Row]) -> str:
    """Of rows that more than their weights tells apart; in fp32 all computers agree."""
    kinds = list(dict.fromkeys(map(_how, rows)))
    if len(kinds) == 1 or {row.dtype for row in rows} == {"float32"}:
        return ""
    return (
        f"\n\nRows were computed differently ({', '.join(kinds)}): equal weights would differ "
        "here too.\n--dtype fp32 computes every row in fp32, so that only the weights differ."
    )


def write_rows(rows: Sequence[Row], out: Path) -> None:
    """Write a .csv or .json file with all of `Row`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".json":
        write_atomic(out, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_atomic(out, text.getvalue())
