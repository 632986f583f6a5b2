"""Recorded bits: what today's code computes, so that a change that should move none moves none.

    python -m tests.golden                    # what differs from golden.json, all of it
    python -m tests.golden --write            # make it anew
    python -m tests.golden --write extreme    # of that part alone

    python -m tests.golden --against FILE --write    # before a refactoring: record everything
    python -m tests.golden --against FILE            # after it, on the same machine: compare
    python -m tests.golden --against FILE --cases 'kept*' loop/memories    # some cases alone

golden.json holds, part by part:
    codecs, extreme   each codec's bytes and decoded values, of nasty inputs and of such as lie near
                      fp32's largest number; by codec over all inputs, by input over all codecs
    three, three_extreme  the same of 3 bits, which came later
    normal            the same of the codec `normal`, which came later still, and its levels
    planes            fp32 in two planes of 16 bits, of the same inputs and of ties
    data              token files, tokenizers and batches
    virtual, gloo     losses, norms and held-out losses of a few steps, and a hash of all weights
                      and optimizer states, with one process and with one a rank
    study, smoke      results.csv of three of the smoke study's arms on text of our own: a few
                      steps, and as many as the study has
Only a FILE of one's own holds:
    cases             every recipe of `fsdp_parity.CASES`, all ranks in one process
    ranks             seventeen of them, one process a rank
    loop              user training loops around `zpp_lab.shard`
Codecs and data are the same everywhere. The others hold where torch's own arithmetic is
that of the machine that recorded them: `machine` is its version, the vector instructions that it
uses, and a hash of what its operators, none of ours, give here.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engines.fsdp_parity import kept
from tests.engines.fsdp_world import run_world
from tests.engines.uneven import batch
from tests.golden_runs import CASES, LOOPS, RANKS, STEPS, digest, loops, real_cases, virtual_cases
from zpp_lab.codecs import BlockCodec, Codec, Noise, NormalCodec, RawCodec, SegmentNoise, encode
from zpp_lab.codecs.families.normal import levels_of
from zpp_lab.codecs.planes import joined, split
from zpp_lab.config.compose import compose, load_study
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import wires_among
from zpp_lab.data import open_data
from zpp_lab.engines.build import build_engine
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.report.table import results_csv
from zpp_lab.train import trainer

FILE = Path(__file__).with_name("golden.json")
CPU = torch.device("cpu")
VOCAB = 37


# ---------------------------------------------------------------- codecs


def words(name: str, count: int) -> np.ndarray:
    """uint32 [count] from a name: the same everywhere, unlike torch's normal numbers."""
    return np.frombuffer(hashlib.shake_128(name.encode()).digest(4 * count), "<u4")


def ordinary(name: str, *shape: int) -> Tensor:
    """fp32, like a bell: sums of four 16-bit numbers, exact."""
    count = int(np.prod(shape))
    halves = words(name, 2 * count).view("<u2").astype(np.int64).reshape(count, 4).sum(1)
    return torch.from_numpy(((halves - 131070) / 65536.0).astype(np.float32)).view(shape)


def any_float(name: str, low: int, high: int, *shape: int) -> Tensor:
    """fp32 of any sign and mantissa, their biased exponents from low to high."""
    drawn = words(name, int(np.prod(shape)))
    exponent = (drawn >> 23 & 255) % (high - low + 1) + low
    made = (drawn & 0x807FFFFF) | exponent.astype(np.uint32) << 23
    return torch.from_numpy(made.view(np.float32).copy()).view(shape)


def nasty() -> dict[str, Tensor]:
    """Name → rows [R, n]."""
    faults = ordinary("faults", 2, 700)
    faults[0, 300], faults[0, 699], faults[1, 5] = torch.nan, torch.inf, -torch.inf
    spikes = ordinary("spikes", 2, 520) * 1e-3
    spikes[:, ::97] *= 1e6
    ties = torch.arange(-256, 256, dtype=torch.float32)[None] / 2
    return {
        "ordinary": ordinary("ordinary", 3, 1024),
        "odd": ordinary("odd", 2, 257),
        "one": ordinary("one", 5, 1),
        "fifteen": ordinary("fifteen", 1, 15),
        "long": ordinary("long", 1, 8193),
        "bf16": ordinary("bf16", 2, 301).bfloat16(),
        "zeros": torch.zeros(2, 33),
        "minus zeros": -torch.zeros(1, 40),
        "constant": torch.tensor([[0.3], [-7.0]]).expand(2, 300).contiguous(),
        "ties": ties,
        "denormals": any_float("denormals", 0, 0, 2, 300),
        "smallest": any_float("smallest", 0, 3, 1, 513),
        "every exponent": any_float("every exponent", 1, 240, 2, 600),
        "huge": any_float("huge", 230, 244, 1, 400),
        "positive": ordinary("positive", 1, 400).abs() + 5,
        "spikes": spikes,
        "faults": faults,
    }


def extreme() -> dict[str, Tensor]:
    """Rows near fp32's largest number, where scales, sums of levels and rotations overflow."""
    top = torch.finfo(torch.float32).max
    ends = torch.tensor([[top, -top, 0.0, 1.0] * 64, [top, top, top, 0.99 * top] * 64])
    return {
        "top": any_float("top", 250, 254, 8, 512),
        "positive": any_float("positive top", 253, 254, 8, 512).abs(),
        "narrow": any_float("narrow", 254, 254, 8, 256).abs(),
        "ends": torch.cat((ends, -ends)),
        "half": ends / 2,
    }


RAW = (RawCodec(torch.float32), RawCodec(torch.bfloat16))


def codecs(*widths: int) -> Iterator[Codec]:
    rotations = {16: ((0, False), (16, True)), 8192: ((0, False), (256, False))}
    rotations[256] = ((0, False), (16, False), (64, True), (256, True))
    wide = product(widths, (True, False), ("nearest", "stochastic"), ("fp32", "bf16"))
    for bits, symmetric, rounding, scale in wide:
        for size, (hadamard, signs) in ((s, r) for s, each in rotations.items() for r in each):
            yield BlockCodec(bits, size, symmetric, rounding, scale, hadamard, signs)


def label(codec: Codec) -> str:
    """Its settings in few words, whatever their classes print."""
    if not isinstance(codec, BlockCodec):
        return f"none {codec.nbytes(16) // 16} bytes"
    halves = "symmetric" if codec.symmetric else "asymmetric"
    halves = "normal" if isinstance(codec, NormalCodec) else halves
    signs = " signs" if codec.random_signs else ""
    own = f"{codec.bits} bits, {codec.block_size}, {halves}, {codec.rounding}"
    return f"{own}, {codec.scale_dtype}, hadamard {codec.hadamard}{signs}"


def coded(inputs: dict[str, Tensor], chosen: Iterable[Codec]) -> dict[str, dict[str, str]]:
    by_codec: dict[str, list[Tensor]] = defaultdict(list)
    by_input: dict[str, list[Tensor]] = defaultdict(list)
    for codec in chosen:
        for name, x in inputs.items():
            rows = tuple(range(len(x)))
            noise = SegmentNoise(Noise(0x0123456789ABCDEF, rows[::-1], rows), 77)
            payload = encode(codec, x, noise if codec.stochastic else None)
            own = payload.view(codec.dtype) if isinstance(codec, RawCodec) else payload  # any NaN
            found = [own, codec.decode(payload, x.shape[1])]
            if len(x) > 2:
                stacked = torch.stack((payload, payload.flip(0), payload))
                found.append(codec.decode_sum(stacked, x.shape[1]))
            by_codec[label(codec)] += found
            by_input[name] += found
    both = {"by codec": by_codec, "by input": by_input}
    return {title: {k: digest(v) for k, v in named.items()} for title, named in both.items()}


def normal() -> dict[str, Any]:
    made = [
        NormalCodec(bits, size, scale_dtype=scale, hadamard=hadamard)
        for bits, size, scale in product((2, 3, 4), (16, 256, 8192), ("fp32", "bf16"))
        for hadamard in (0, 16)
    ]
    levels = [torch.tensor(levels_of(c.bits, c.block_size)) for c in made]
    found = coded({**nasty(), **extreme()}, made)
    return {**found, "levels": {label(c): digest([t]) for c, t in zip(made, levels, strict=True)}}


# ---------------------------------------------------------------- data


def planes() -> dict[str, str]:
    """Both planes and their sum, by input."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    ties = {"ties": torch.stack([high + 0x7FFF, high + 0x8000, high + 0x8001]).view(torch.float32)}
    found = {}
    for name, values in (nasty() | extreme() | ties).items():
        two = split(values.float())
        found[name] = digest([*two, joined(*two)])
    return found


def text(name: str, count: int) -> str:
    """Words of a small vocabulary, the earlier ones more often, in lines."""
    stems = [f"{'bcdfghklmnprst'[i % 14]}{'aeiou'[i % 5]}{'nrslt'[i % 3]}e{i}" for i in range(60)]
    drawn = [min(int(w >> 16) % 60, int(w & 0xFFFF) % 60) for w in words(name, count)]
    return "".join(stems[d] + ("\n" if d % 7 == 0 else " ") for d in drawn)


def write_texts(folder: Path) -> tuple[Path, Path]:
    """A folder of text files, and a file of records."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for i in range(6):
        (texts / f"part{i}.txt").write_text(text(f"part{i}", 1500) + "naïve — 数\n")
    records = [
        {"prompt": text(f"p{i}", 3 + i % 11), "completion": text(f"c{i}", 1 + i % 17)}
        for i in range(120)
    ]
    lines = folder / "records.jsonl"
    lines.write_text("".join(json.dumps(r) + "\n" for r in records))
    return texts, lines


def data(folder: Path) -> dict[str, str]:
    texts, lines = write_texts(folder)
    kinds = {
        "bytes": ["data=text", f"data.path={texts}"],
        "bpe": ["data=text", f"data.path={texts}", "data.tokenizer=bpe", "data.vocab_size=300"],
        "records": ["data=jsonl", f"data.path={lines}"],
        "unpacked": ["data=jsonl", f"data.path={lines}", "data.records.pack=false"],
    }
    found = {}
    for name, overrides in kinds.items():
        length = 48 if "data=text" in overrides else 160
        split = ["data.heldout_every=3", f"data.seq_len={length}"]
        split += [f"data.cache_dir={folder / name}"]
        opened = open_data(compose([*overrides, *split]).data)
        files = sorted(p for p in opened.folder.iterdir() if p.suffix == ".bin")
        own = [opened.hash, opened.tokenizer, str(opened.vocab_size)]
        found[f"{name}: hashes"] = digest(own)
        found[f"{name}: files"] = digest(part for p in files for part in (p.name, p.read_bytes()))
        steps = [opened.step(seed, step, 4, 2, 4, length) for seed, step in ((1, 0), (2**40, 9))]
        drawn = [batches(*turn) for batches in steps for turn in ((0, 0), (3, 1))]
        drawn += opened.heldout(2000, 4, length)
        found[f"{name}: batches"] = digest(t for b in drawn for t in b)
    return found


# ---------------------------------------------------------------- training

SHAPE = ["model.dim=16", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn=23"]
SHAPE += ["train.lr=1e-2", "train.clip=0.5", "engine.device=cpu", "data.seq_len=8"]
Q8, Q4 = "{bits: 8, block_size: 16}", "{bits: 4, block_size: 16}"
BF16, BOTH_BF16 = "train.param_dtype=bf16", "train.reduce_dtype=bf16"
TWICE, LAST = "train.micro_steps=2", "train.accumulate=last"
ADAPTERS = ["model.lora.rank=3", "model.lora.alpha=6", "model.weights=pretrained"]

# name → (nodes, GPUs per node, overrides)
RUNS: dict[str, tuple[int, int, list[str]]] = {
    "zero3": (2, 2, ["recipe=zero3"]),
    "reordered": (3, 2, ["recipe=zero3_reordered", BF16]),
    "zero3 in two hops": (3, 2, ["recipe=zero3", "recipe.hops=2", BF16, BOTH_BF16]),
    "zero2": (1, 5, ["recipe=w8", "recipe.stage=2", "recipe.grads.bits=8", TWICE]),
    "zero1": (2, 2, ["recipe=w4", "recipe.stage=1", TWICE, LAST, BF16]),
    "zeropp": (2, 2, ["recipe=zeropp"]),
    "zeropp small blocks": (
        3,
        2,
        ["recipe=zeropp", "recipe.weights.block_size=16", "recipe.grads.block_size=16", TWICE],
    ),
    "zeropp in one node": (1, 5, ["recipe=zeropp", BF16, TWICE, LAST]),
    "hpz alone": (2, 2, ["recipe=zero3", "recipe.secondary=true", BF16]),
    "qsdp": (1, 5, ["recipe=qsdp", TWICE]),
    "stochastic two hops": (
        3,
        2,
        ["recipe=zeropp", "recipe.weights.rounding=stochastic", "recipe.grads.rounding=stochastic"],
    ),
    "broken": (2, 2, ["recipe=broken"]),
    "w6": (3, 2, ["recipe=w6", "recipe.weights.block_size=64", BF16]),
    "w2": (1, 5, ["recipe=w2", "train.optimizer_state=8bit"]),
    "hadamard": (2, 2, ["recipe=g8_4_hadamard"]),
    "hadamard signs": (
        3,
        2,
        [
            "recipe=g8_4_hadamard",
            "recipe.grads.random_signs=true",
            "recipe.grads_inter.rounding=stochastic",
        ],
    ),
    "asymmetric": (
        2,
        2,
        [
            "recipe=zeropp",
            "recipe.weights.symmetric=false",
            "recipe.weights.scale_dtype=bf16",
            "recipe.grads.symmetric=false",
        ],
    ),
    "other bits backward": (1, 5, ["recipe=w4", "recipe.weights_backward.bits=6", TWICE, LAST]),
    "exempt": (
        2,
        2,
        ["recipe=w4", "recipe.exempt.max_ndim=0", "recipe.exempt.names=[embed*]", "seed=9"],
    ),
    "rules": (
        3,
        2,
        [
            "recipe=w8",
            f"recipe.grads={Q8}",
            f"recipe.rules=[{{name: '*down*', set: {Q4}}}, {{name: '*norm*', exempt: true}}]",
        ],
    ),
    "bf16 states": (2, 2, ["recipe=zeropp", BF16, "train.optimizer_state=bf16"]),
    "8bit states": (1, 5, ["recipe=qsdp", "train.optimizer_state=8bit", "train.residual_lr=0.1"]),
    "philox start": (1, 5, ["recipe=w8", "model.init=philox", "model.tied_head=true"]),
    "adapters": (2, 2, ["recipe=zeropp", *ADAPTERS, "lora=q4"]),
    "adapters raw": (1, 5, ["recipe=qsdp", *ADAPTERS, "lora=raw", BF16]),
}
GLOO: dict[str, tuple[int, int, list[str]]] = {
    "zero3": (1, 2, ["recipe=zero3"]),
    "qsdp": (2, 1, ["recipe=qsdp", TWICE, BF16]),
    "8bit states": (1, 3, ["recipe=zeropp", "train.optimizer_state=8bit"]),
    "zeropp": (2, 2, ["recipe=zeropp", BF16, BOTH_BF16, TWICE]),
    "hadamard": (2, 2, ["recipe=g8_4_hadamard", "recipe.weights.bits=6"]),
}


def config_of(run: tuple[int, int, list[str]], engine: str, base: Path) -> Config:
    nodes, local, overrides = run
    cluster = [f"cluster.nodes={nodes}", f"cluster.gpus_per_node={local}", f"engine={engine}"]
    cluster += ["engine.gather=hierarchical"]
    if engine == "fsdp":
        cluster += ["engine.ordered=true"]
    if ADAPTERS[0] in overrides:
        cluster += [f"model.path={base}"]
    return compose([*SHAPE, *cluster, *overrides])


def trained(config: Config) -> dict[str, Any]:
    """A few steps with evaluations on and off the wire; to be called on every rank."""
    torch.use_deterministic_algorithms(True)
    engine = build_engine(config, VOCAB, CPU)
    done = [engine.step(s, 1e-2, partial(batch, s), telemetry=s == 1) for s in range(STEPS)]
    heldout = [batch(999, i, 0) for i in range(3)]
    state = kept(engine)
    return {
        "losses": [r.loss for r in done],
        "norms": [r.grad_norm for r in done],
        "heldout": [engine.evaluate(STEPS, heldout, wire) for wire in (True, False)],
        "bytes": digest(str([(w, *t) for w, t in sorted(r.bytes.items())]) for r in done),
        "state": digest(part for name in sorted(state) for part in (name, state[name])),
    }


def every(configs: dict[str, Config]) -> dict[str, Any]:
    return {name: trained(config) for name, config in configs.items()}


def virtual(folder: Path, cases: Collection[str] = tuple(RUNS)) -> dict[str, Any]:
    from tests.models.lora.models import save_base

    save_base(folder, VOCAB)
    return every({name: config_of(RUNS[name], "virtual", folder) for name in cases})


def gloo(
    folder: Path, cases: Collection[str] = tuple(GLOO), worlds: tuple[int, ...] = (2, 3, 4)
) -> dict[str, Any]:
    configs = {name: config_of(GLOO[name], "fsdp", folder) for name in cases}
    found: dict[str, Any] = {}
    for world in worlds:
        chosen = {n: c for n, c in configs.items() if c.cluster.world == world}
        found |= run_world(world, every, chosen) if chosen else {}
    return found


COLUMNS = ("recipe", "outcome", "steps", "last_step", "planned_steps", "tokens")
COLUMNS += ("heldout_loss", "heldout_loss_master", "gap")
COLUMNS += tuple(f"bytes_{wire}_{hop}" for wire in wires_among() for hop in ("intra", "inter"))


def study(folder: Path, steps: int = 12) -> dict[str, dict[str, str]]:
    """Lines of results.csv, by arm and seed, without the columns that were added since."""
    texts, _ = write_texts(folder)
    own = ["data=text", f"data.path={texts}", f"data.cache_dir={folder / 'cache'}"]
    own += [f"train.steps={steps}", "tracking.wandb=off", "engine.threads=1"]
    own += ["train.eval_tokens=2048", "data.heldout_every=3"]
    asked = load_study("smoke", {"seeds": [1]}, own)
    arms = [a for a in asked.arms if a.name in ("zero3", "qsdp", "g8_4_hadamard")]
    for arm, seed in product(arms, asked.seeds):
        place = folder / "runs" / arm.name / f"seed{seed}"
        named = [f"run.dir={place}", f"run.study={asked.name}", f"run.arm={arm.name}"]
        trainer.run(compose([*asked.overrides, *arm.overrides, f"seed={seed}", *named]))
    rows = csv.DictReader(io.StringIO(results_csv(read_result(folder / "runs"))))
    return {f"{row['arm']} {row['seed']}": {k: row[k] for k in COLUMNS} for row in rows}


# ---------------------------------------------------------------- machine, file, command


def machine() -> dict[str, str]:
    """What torch's own floating-point arithmetic depends on, and what it gives here."""
    assert torch.get_num_threads() == 1, "bits of sums are those of one thread: OMP_NUM_THREADS=1"
    torch.manual_seed(5)
    found: list[Tensor] = []
    for dtype, rows in product((torch.float32, torch.bfloat16), (16, 256)):
        embed, up = torch.randn(VOCAB, 16), torch.randn(23, 16) / 4
        held = [t.to(dtype).requires_grad_() for t in (embed, up, torch.randn(16, 23) / 4)]
        x = F.embedding(torch.arange(rows).remainder(VOCAB), held[0])
        x = x + F.linear(F.silu(F.linear(F.rms_norm(x, (16,)), held[1])), held[2])
        q = x.view(2, 2, rows // 2, 8)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(rows, 16)
        logits = F.linear(x, held[0]).float()
        loss = F.cross_entropy(logits, torch.arange(rows).remainder(VOCAB))
        loss.backward()
        found += [loss, logits, *(t.grad for t in held if t.grad is not None)]
        moved = torch.nn.Parameter(held[0].detach().float())
        moved.grad = torch.randn(VOCAB, 16)
        for fused in (False, True):
            torch.optim.AdamW([moved], 1e-2, fused=fused).step()
        found += [moved, torch.cos(moved), torch.exp(moved).sum(), moved.double().square().sum()]
    return {
        "torch": torch.__version__.partition("+")[0],
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "operators": digest(found),
    }


PARTS = {
    "codecs": lambda folder: coded(nasty(), [*RAW, *codecs(2, 4, 6, 8)]),
    "extreme": lambda folder: coded(extreme(), [*RAW, *codecs(2, 4, 6, 8)]),
    "three": lambda folder: coded(nasty(), codecs(3)),
    "three_extreme": lambda folder: coded(extreme(), codecs(3)),
    "normal": lambda folder: normal(),
    "planes": lambda folder: planes(),
    "data": data,
    "virtual": virtual,
    "gloo": gloo,
    "study": study,
    "smoke": partial(study, steps=120),
    "cases": virtual_cases,
    "ranks": real_cases,
    "loop": loops,
}
OWN = ("cases", "ranks", "loop")  # in golden.json they would skip on most machines
NAMED: dict[str, Collection[str]] = {"virtual": RUNS, "gloo": GLOO, "cases": CASES}
NAMED |= {"ranks": RANKS, "loop": LOOPS}
EVERYWHERE = ("codecs", "extreme", "three", "three_extreme", "normal", "planes", "data")


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def computed(part: str, **more: Any) -> Any:
    """What today's code gives, as JSON would read it again."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        return json.loads(json.dumps(PARTS[part](Path(folder), **more)))


def differences(found: Any, wanted: Any, place: str = "") -> list[str]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = [*wanted, *(k for k in found if k not in wanted)]
        return [
            line for k in keys for line in differences(found.get(k), wanted.get(k), f"{place}/{k}")
        ]
    return [] if found == wanted else [f"{place}: {found}, recorded {wanted}"]


def settle(found: Mapping[str, Any], file: Path, write: bool, some: bool = False) -> int:
    """Write what was found into the file, or print what differs from it; returns the exit code.
    `some`: of each part only some cases were asked for."""
    before: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if write:
        merged = {k: before.get(k, {}) | own if some else own for k, own in found.items()}
        file.write_text(json.dumps(before | merged, indent=1, ensure_ascii=False) + "\n")
        return 0
    wanted = {key: before.get(key, {}) for key in found}
    if some:
        wanted = {k: {n: v for n, v in own.items() if n in found[k]} for k, own in wanted.items()}
    lines = differences(found, wanted)
    print("\n".join(lines) or "no bit differs")
    return 1 if lines else 0


def arguments(prog: str, about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, metavar="FILE", help="the file of one's own")
    parser.add_argument("--cases", nargs="+", metavar="PATTERN", help="of NAME or PART/NAME")
    parser.add_argument("--write", action="store_true", help="record; without it, compare")
    return parser


def picked(part: str, names: Iterable[str], patterns: Collection[str] | None) -> list[str]:
    asked = ["*"] if patterns is None else patterns
    return [n for n in names if any(fnmatchcase(t, p) for t in (n, f"{part}/{n}") for p in asked)]


def main(words: list[str] | None = None) -> int:
    parser = arguments("python -m tests.golden", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    parts = asked.parts or [p for p in PARTS if asked.against or p not in OWN]
    chosen: dict[str, dict[str, Any]] = {part: {} for part in parts}
    if asked.cases:
        every = {part: picked(part, NAMED.get(part, ()), asked.cases) for part in parts}
        chosen = {part: {"cases": cases} for part, cases in every.items() if cases}
    file = asked.against or FILE
    if not chosen or not (asked.write or file.exists()):
        parser.error(f"{asked.cases}: no such case, or {file} not found: record it with --write")
    found = {part: computed(part, **more) for part, more in chosen.items()}
    return settle({"machine": machine()} | found, file, asked.write, bool(asked.cases))


if __name__ == "__main__":
    sys.exit(main())
