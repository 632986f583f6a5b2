"""`zpp-lab export`, `evaluate` and `tune`."""

from __future__ import annotations

import argparse
from pathlib import Path

from zpp_lab.cli.adding import Add
from zpp_lab.config.parser import new_file, number, whole

EXPORT = """    zpp-lab export runs/first runs/bits --out runs.csv
    zpp-lab export runs/first/w4/seed1 --to hf --out my_model --dtype bf16"""
TUNE = "    zpp-lab tune runs/first/zero3/seed1 --bits 4.125 --out conf/recipe/tuned.yaml"
_OF_QUANTIZED = ("codec", "requantize", "dense")


def add_weights(add: Add) -> None:
    _add_export(add)
    _add_evaluate(add)
    _add_tune(add)


def _add_export(add: Add) -> None:
    out = add(
        "export", "write runs as one table, or a run's weights for transformers", _export, EXPORT
    )
    out.add_argument(
        "dirs", type=Path, nargs="+", help="folders with runs; for hf and peft, one run's folder"
    )
    out.add_argument(
        "--to", choices=["table", "hf", "peft"], default="table", help="default: table"
    )
    out.add_argument(
        "--out",
        type=Path,
        required=True,
        help="a .csv or .parquet file; for hf and peft, a new folder",
    )
    out.add_argument(
        "--steps", action="store_true", help="table: write one row a step instead of one a run"
    )
    out.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], help="hf: dtype of the weights (default: fp32)"
    )
    out.add_argument(
        "--license",
        metavar="NAME",
        help="hf, peft: license in the model card (default: the base model's)",
    )
    out.add_argument(
        "--quantized",
        action="store_true",
        help="hf: export the quantized weights that training computes with, packed",
    )
    out.add_argument(
        "--codec",
        metavar="SETTINGS",
        help="quantized: round the fp32 masters with this codec, such as bits=4,block_size=128",
    )
    unfit = out.add_mutually_exclusive_group()
    unfit.add_argument(
        "--requantize",
        action="store_true",
        help="quantized: round again what does not fit the format",
    )
    unfit.add_argument(
        "--dense", action="store_true", help="quantized: store decoded what does not fit the format"
    )


def _add_evaluate(add: Add) -> None:
    losses = add(
        "evaluate", "measure held-out loss and perplexity of runs and of model folders", _evaluate
    )
    losses.add_argument(
        "paths", type=Path, nargs="+", help="run folders, and model folders of transformers"
    )
    losses.add_argument(
        "--data", type=Path, metavar="RUN", help="the run whose held-out tokens to use"
    )
    losses.add_argument(
        "--codec",
        action="append",
        default=[],
        metavar="SETTINGS",
        help="runs: also measure them rounded with this codec, such as bits=4; repeatable",
    )
    losses.add_argument(
        "--tokens", type=whole(1), metavar="N", help="held-out tokens (default: the run's)"
    )
    losses.add_argument(
        "--dtype",
        choices=["fp32", "bf16"],
        help="dtype to compute in (default: as trained, or as the folder says)",
    )
    losses.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    losses.add_argument(
        "--out", type=new_file, metavar="FILE", help="also write a .csv or .json file"
    )


def _add_tune(add: Add) -> None:
    bits = add(
        "tune",
        "choose bits and block sizes for each class of a run's weights; writes a recipe",
        _tune,
        TUNE,
    )
    bits.add_argument("run", type=Path, help="folder of a run trained without quantization")
    bits.add_argument(
        "--bits",
        type=number(above=0),
        required=True,
        metavar="B",
        help="average bits a weight at most, scales included; 4 bits with blocks of 256 take 4.125",
    )
    bits.add_argument("--out", type=new_file, required=True, help="conf/recipe/NAME.yaml")
    bits.add_argument(
        "--among", type=whole(1), nargs="+", default=[2, 3, 4, 6, 8], metavar="BITS",
        help="bits to choose from (default: 2 3 4 6 8)",
    )  # fmt: skip
    bits.add_argument(
        "--blocks", type=whole(1), nargs="+", default=[64, 128, 256, 2048], metavar="N",
        help="block sizes to choose from (default: 64 128 256 2048)",
    )  # fmt: skip
    bits.add_argument(
        "--tokens",
        type=whole(1),
        metavar="N",
        help="held-out tokens to measure on (default: the run's)",
    )
    bits.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def _tune(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.tools.tune import tune_command

    return tune_command(
        args.run, args.bits, args.among, args.blocks, args.tokens, args.device, args.out
    )


def _export(args: argparse.Namespace, _: list[str]) -> int:
    args.dir, *others = args.dirs
    if args.to != "table" and others:
        raise ValueError(f"--to {args.to} takes one run's folder, not {len(args.dirs)}")
    if args.to == "hf":
        return _export_quantized(args) if args.quantized else _export_hf(args)
    _refuse(args, ("quantized",), "--to hf")
    _refuse(args, _OF_QUANTIZED, "--to hf --quantized")
    if args.to == "peft":
        return _export_peft(args)
    _refuse(args, ("dtype",), "--to hf")
    _refuse(args, ("license",), "--to hf and --to peft")
    from zpp_lab.study.report.export import export

    print(f"{export(args.dirs, args.out, args.steps)} rows: {args.out}")
    return 0


def _refuse(args: argparse.Namespace, names: tuple[str, ...], where: str) -> None:
    """ValueError for a setting that would not be heeded."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False:  # 0 was given
            raise ValueError(f"--{name.replace('_', '-')} works only with {where}")


def _export_hf(args: argparse.Namespace) -> int:
    _refuse(args, ("steps",), "--to table")
    _refuse(args, _OF_QUANTIZED, "--quantized")
    from zpp_lab.tools.export import export_hf

    made = export_hf(args.dir, args.out, args.dtype or "fp32", license=args.license)
    print(f"step {made.step}: {made.tensors} tensors, {made.nbytes:,} bytes: {args.out}")
    return 0


def _export_quantized(args: argparse.Namespace) -> int:
    _refuse(args, ("steps",), "--to table")
    from zpp_lab.tools.export import export_quantized
    from zpp_lab.tools.export.wire import parse_codec

    made = export_quantized(
        args.dir,
        args.out,
        codec=None if args.codec is None else parse_codec(args.codec),
        unfit="requantize" if args.requantize else "dense" if args.dense else "refuse",
        dtype=args.dtype,
        license=args.license,
    )
    print(
        f"step {made.step}: {made.packed} weights packed ({made.requantized} of them rounded "
        f"again), {made.decoded} stored as they decode; {made.nbytes:,} bytes: {args.out}"
    )
    return 0


def _export_peft(args: argparse.Namespace) -> int:
    if args.steps or args.dtype:
        raise ValueError("--to peft: leave out --steps and --dtype; adapters stay in fp32")
    from zpp_lab.tools.export import export_peft

    made = export_peft(args.dir, args.out, args.license)
    print(f"step {made.step}: {made.tensors} adapters, {made.nbytes:,} bytes: {args.out}")
    return 0


def _evaluate(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.tools.evaluate import evaluate_command

    return evaluate_command(
        args.paths, args.data, args.codec, args.tokens, args.device, args.out, args.dtype
    )
