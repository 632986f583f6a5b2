"""zpp-lab: train one run, run a study, rebuild a report, look at the machine.

Hydra's grammar everywhere: `zpp-lab train recipe=zeropp train.steps=100`, several values with
`-m`: `zpp-lab train -m recipe.weights.bits=2,4,6,8 seed=1,2,3`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zpp_lab.config import Config, StudyConfig
from zpp_lab.piece import PAUSED, UNFINISHED, seconds

if TYPE_CHECKING:
    from zpp_lab.study.speed_rows import Predict


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; a user's mistake is 2 with one clear message."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    known, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-") and "=" not in word]
    if known.command is None or (unknown and not known.passes_on):
        parser.error(f"unknown option {unknown[0]}" if unknown else "name a command")
    try:
        return int(known.call(known, rest) or 0)
    except (ValueError, OSError) as error:
        print(f"zpp-lab {known.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"zpp-lab {known.command}: {_advice(error, 'this again')}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130


ALONE = "with --arms: these runs only; the study keeps its other arms and seeds, run elsewhere"
SPEED = "results.csv of `bench step`: speeds of a study's arms; the study keeps a copy"
MACHINE = "figures of `bench calibrate`, or a name such as h200: predicted speeds too"
PIECE = "stop before so long has passed (8m, 480s) with checkpoints; the same command goes on"
REPORT_PACKAGES = ("altair", "jinja2", "markupsafe", "pandas", "scipy", "statsmodels", "vl_convert")


def _advice(error: ModuleNotFoundError, then: str) -> str:
    """What to do where a package of the report is absent. Any other absence is a fault of ours."""
    if error.name not in REPORT_PACKAGES:
        raise error
    return (
        f"this needs {error.name}, which is not installed; the runs are safe. Run `pip install "
        f"'zpp_lab[report]'` here or on another machine, then {then}"
    )


Add = Callable[..., argparse.ArgumentParser]  # name, text, call: a sub-command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("zpp-lab", description=__doc__)
    commands = parser.add_subparsers(dest="command")

    def add(name: str, text: str, call, passes_on: bool = False) -> argparse.ArgumentParser:  # type: ignore[no-untyped-def]
        sub = commands.add_parser(name, help=text, description=text, add_help=not passes_on)
        sub.set_defaults(call=call, passes_on=passes_on)
        return sub

    _training(add)
    _results(add)
    _weights(add)
    _machine(add)
    return parser


def _training(add: Add) -> None:
    train = add("train", "one run, or several with -m; takes Hydra overrides", _train, True)
    train.add_argument("--for", dest="piece", metavar="TIME", help=PIECE)
    study = add("study", "all runs of conf/study/NAME.yaml, then the report", _study)
    study.add_argument("name", help="a study's name, or the path of a YAML file")
    study.add_argument("--dir", type=Path, help="where to put the runs (default: runs/NAME)")
    study.add_argument("--jobs", type=int, help="runs side by side (default: cores or GPUs)")
    study.add_argument("--seeds", help="seeds in place of the study's, such as 1,2,3,4")
    study.add_argument("--arms", help="only these arms, such as zero3*,broken, and their baselines")
    study.add_argument("--alone", action="store_true", help=ALONE)
    study.add_argument("--for", dest="piece", metavar="TIME", help=PIECE)
    study.add_argument("--retry", action="store_true", help="also what diverged or gave up")
    study.add_argument("--dry-run", action="store_true", help="runs, cost and what is done already")
    study.add_argument("--watch", action="store_true", help="a live table of a study that runs")
    study.add_argument("--launcher", help="a Hydra launcher (slurm, joblib) for the runs")
    tokens = add("prepare", "make a study's token files before its runs need them", _prepare)
    tokens.add_argument("name", help="a study's name, or the path of a YAML file")


def _results(add: Add) -> None:
    report = add("report", "the report of a folder of runs, or of measured speeds", _report)
    report.add_argument("dir", type=Path, help="a study's folder, or one of `bench step`")
    report.add_argument("--speed", type=Path, metavar="FILE", help=SPEED)
    report.add_argument("--machine", metavar="FILE", help=MACHINE)
    comparison = add("compare", "line up the arms of several studies", _compare)
    comparison.add_argument("dirs", type=Path, nargs="+", help="the studies' folders")
    comparison.add_argument("--out", type=Path, help="write a .csv, .md or .html file too")
    sync = add("sync", "send finished runs to wandb again", _sync)
    sync.add_argument("dirs", type=Path, nargs="+", help="run folders, or folders that hold some")
    pages = add("dashboard", "a study's workspace and report in wandb, as code", _dashboard)
    pages.add_argument("study", nargs="?", help="a study's folder, its name or its YAML file")
    pages.add_argument("--apply", type=Path, metavar="FILE", help="make the pages of such a file")
    pages.add_argument("--out", type=Path, help="where to write their specification")
    pages.add_argument("--project", help="wandb's project (default: the runs' own)")
    pages.add_argument("--entity", help="wandb's user or team (default: the runs' own)")


def _weights(add: Add) -> None:
    out = add("export", "runs as one table, or a run's weights for transformers", _export)
    out.add_argument("dir", type=Path, help="a folder with runs; for hf and peft, a run's own")
    out.add_argument(
        "--to", choices=["table", "hf", "peft"], default="table", help="default: table"
    )
    out.add_argument(
        "--out",
        type=Path,
        required=True,
        help="a .csv or .parquet file; for hf and peft, a new folder",
    )
    out.add_argument("--steps", action="store_true", help="table: one row a step, not one a run")
    out.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="hf: default fp32")
    out.add_argument(
        "--quantized", action="store_true", help="hf: as the weights' wire brings them, packed"
    )
    out.add_argument("--codec", help="quantized: round afterwards, such as bits=4,block_size=128")
    out.add_argument("--group-size", type=int, help="quantized: elements that share a scale")
    unfit = out.add_mutually_exclusive_group()
    unfit.add_argument(
        "--requantize", action="store_true", help="quantized: round anew what does not fit"
    )
    unfit.add_argument("--dense", action="store_true", help="quantized: decode what does not fit")
    losses = add("evaluate", "held-out loss and perplexity of runs and of folders", _evaluate)
    losses.add_argument("paths", type=Path, nargs="+", help="runs, and folders for transformers")
    losses.add_argument("--data", type=Path, help="the run whose held-out tokens to take")
    losses.add_argument("--codec", action="append", default=[], help="runs: rounded with it too")
    losses.add_argument("--tokens", type=int, help="held-out tokens (default: as the run has them)")
    losses.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    losses.add_argument("--out", type=Path, help="write a .csv or .json file too")


def _machine(add: Add) -> None:
    plan = add("plan", "what a run will send and hold, and whether it fits its GPUs", _plan)
    plan.add_argument(
        "--gpu-gib",
        "--memory-gib",
        dest="gpu_gib",
        type=float,
        help="a GPU's memory (default: this machine's, or 80)",
    )
    plan.add_argument("--json", action="store_true", help="bytes, for scripts")
    plan.add_argument(
        "--machine", help="predict times: a file of `bench calibrate`, or a name such as h200"
    )
    plan.add_argument(
        "--link-gbps", help="with --machine: of a node's links, 12,25,max (default: max)"
    )
    _fastest(plan)
    add("doctor", "what this machine can do", _doctor)
    bench = add(
        "bench", "measure kernels, collectives, engines or training steps", _bench, passes_on=True
    )
    bench.add_argument(
        "what",
        choices=["kernels", "collectives", "virtual", "deterministic", "step", "calibrate"],
    )
    add(
        "emulate",
        "run a command on emulated nodes of this host: zpp-lab emulate --nodes 2 -- COMMAND",
        _emulate,
        passes_on=True,
    )
    add("build", "compile the CUDA kernels ahead of time", _build, passes_on=True)


def _fastest(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--fastest", action="store_true", help="search the fastest plan that fits")
    search = plan.add_argument_group("with --fastest")
    search.add_argument("--study", type=Path, help="a finished study: only recipes on par in it")
    search.add_argument(
        "--max-gap", type=float, help="of the baseline's loss (default: its margin)"
    )
    search.add_argument("--allow", choices=["undecided"], help="undecided arms of the study too")
    search.add_argument("--next-study", type=Path, help="write a study of the faster recipes")


def _until(piece: str | None) -> float | None:
    """The unix time that `--for` means, counted from now."""
    return None if piece is None else time.time() + seconds(piece)


def _train(args: argparse.Namespace, overrides: list[str]) -> int:
    if any(word in ("-h", "--help") for word in overrides):
        print("usage: zpp-lab train [-m] [--for TIME] [setting=value ...]\n\n" + (__doc__ or ""))
        print("Settings: " + ", ".join(f.name for f in _fields(Config)) + "; see conf/")
        return 0
    until = _until(args.piece)
    times = [] if until is None else [f"run.until={until!r}"]
    if "-m" in overrides or "--multirun" in overrides:
        from zpp_lab.multirun import multirun

        return multirun([*(o for o in overrides if o not in ("-m", "--multirun")), *times])
    from zpp_lab.compose import compose
    from zpp_lab.launcher import RankFailed, launch, leave

    try:
        summary = launch(compose([*overrides, *times]))
    except RankFailed as error:
        print(f"zpp-lab train: {error}", file=sys.stderr)
        return 1
    paused = summary.get("outcome") == UNFINISHED
    if paused:
        print("stopped before the end; the same command goes on from here")
    elif summary:  # rank 0, when somebody else started the ranks
        loss = f"held-out loss {summary['heldout_loss']:.4f}"
        if "perplexity" in summary:  # runs of older versions have none
            loss += f", perplexity {summary['perplexity']:.4g},"
        print(f"{loss} after {summary['steps']} steps")
    leave()
    return PAUSED if paused else 0


def _fields(cls: type):  # type: ignore[no-untyped-def]
    from dataclasses import fields

    return fields(cls)


def _study(args: argparse.Namespace, overrides: list[str]) -> int:
    from zpp_lab.compose import load_study
    from zpp_lab.study import run_study
    from zpp_lab.study.selection import matching, some_arms

    seeds = _numbers(args.seeds) if args.seeds else []
    changes: dict[str, object] = {"seeds": seeds} if seeds and not args.alone else {}
    study = load_study(args.name, changes, overrides)
    if args.alone and not args.arms:
        raise ValueError("--alone goes with --arms, such as --arms w8 --alone")
    patterns = args.arms.split(",") if args.arms else []
    if patterns and not args.alone:
        study = some_arms(study, patterns)
    root = args.dir or Path("runs") / study.name
    if args.watch:
        from zpp_lab.study.watch import show

        show(root, study)
        return 0
    if args.dry_run:
        from zpp_lab.study.dry_run import dry_run

        return int(bool(dry_run(study, root, args.jobs or 0).faults))
    outcome = run_study(
        study,
        root,
        args.jobs or 0,
        retry=args.retry,
        launcher=args.launcher,
        arms=matching(study, patterns) if args.alone else (),
        seeds=seeds if args.alone else (),
        until=_until(args.piece),
    )
    if not outcome.unfinished and not outcome.waiting:
        _finish(root, study)
    return outcome.exit_code


def _prepare(args: argparse.Namespace, overrides: list[str]) -> int:
    from zpp_lab.compose import compose, load_study
    from zpp_lab.data import open_data

    study = load_study(args.name, {}, overrides)
    arm = next(arm for arm in study.arms if arm.name == study.baseline)
    config = compose([*study.overrides, *arm.overrides])
    began = time.monotonic()
    data = open_data(config.data)
    print(
        f"{data.files} documents, {data.tokens:,} training and {data.heldout_tokens:,} held-out "
        f"tokens, vocabulary {data.vocab_size}, hash {data.hash[:16]}, "
        f"{time.monotonic() - began:.1f} s"
    )
    return 0


def _finish(root: Path, study: StudyConfig) -> None:
    """The report, here and in wandb. Runs that ended well do not fail for want of a chart."""
    try:
        _show(root, study)
    except ModuleNotFoundError as error:
        advice = _advice(error, f"`zpp-lab report {root}`")
        print(f"zpp-lab study: no report: {advice}", file=sys.stderr)
        return
    from zpp_lab.dashboard import publish

    publish.start(root)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds {text}: give whole numbers, such as 1,2,3") from None


def _report(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.study.speed_results import is_speed_table

    if is_speed_table(args.dir):
        if args.speed:
            raise ValueError(f"{args.dir} holds speeds: --speed goes with the folder of a study")
        _show_speed(args.dir, _predict(args.machine))
    else:
        _show(args.dir, None, args.speed, _predict(args.machine))
    return 0


def _predict(machine: str | None) -> Predict | None:
    """The predictions of a machine's figures; only these need torch."""
    if machine is None:
        return None
    from zpp_lab.predicted import predictions

    return partial(predictions, machine=machine)


def _show_speed(path: Path, predict: Predict | None) -> None:
    """Make the page of measured speeds and print its table."""
    from zpp_lab.study.speed_report import build_speed_report

    report = build_speed_report(path, predict)
    print(report.table)
    print(f"\nreport: {report.html}")


def _show(
    root: Path,
    study: StudyConfig | None,
    speed: Path | None = None,
    predict: Predict | None = None,
) -> None:
    """Build the report of the runs below `root` and print its table."""
    from zpp_lab.study import build_report  # loads the charting libraries: after the runs

    report = build_report(root, study, speed, predict)
    print(report.table)
    print(f"\nreport: {report.html}")


def _compare(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.study.compare import compare
    from zpp_lab.study.comparison_text import console, write_comparison

    found = compare(args.dirs)
    print(console(found))
    if args.out:
        write_comparison(found, args.out)
        print(f"\nwritten: {args.out}")
    return 0


def _export(args: argparse.Namespace, _: list[str]) -> int:
    if args.to == "hf":
        return _export_quantized(args) if args.quantized else _export_hf(args)
    if args.to == "peft":
        return _export_peft(args)
    if args.dtype or args.quantized:
        raise ValueError(f"--{'dtype' if args.dtype else 'quantized'} is for --to hf")
    from zpp_lab.study.export import export

    print(f"{export(args.dir, args.out, args.steps)} rows: {args.out}")
    return 0


def _export_hf(args: argparse.Namespace) -> int:
    if args.steps:
        raise ValueError("--steps is for --to table")
    for name in ("codec", "group_size", "requantize", "dense"):
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} is for --quantized")
    from zpp_lab.export import export_hf

    made = export_hf(args.dir, args.out, args.dtype or "fp32")
    print(f"step {made.step}: {made.tensors} tensors, {made.nbytes:,} bytes: {args.out}")
    return 0


def _export_quantized(args: argparse.Namespace) -> int:
    if args.steps:
        raise ValueError("--steps is for --to table")
    from zpp_lab.export import export_quantized
    from zpp_lab.export.wire import parse_codec

    made = export_quantized(
        args.dir,
        args.out,
        codec=parse_codec(args.codec) if args.codec else None,
        unfit="requantize" if args.requantize else "dense" if args.dense else "refuse",
        group=args.group_size,
        dtype=args.dtype,
    )
    print(
        f"step {made.step}: {made.packed} weights packed ({made.requantized} of them rounded "
        f"anew), {made.decoded} stored as they decode; {made.nbytes:,} bytes: {args.out}"
    )
    return 0


def _evaluate(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.evaluate import evaluate_command

    return evaluate_command(args.paths, args.data, args.codec, args.tokens, args.device, args.out)


def _export_peft(args: argparse.Namespace) -> int:
    if args.steps or args.dtype:
        raise ValueError("--to peft takes no --steps and no --dtype: adapters stay in fp32")
    from zpp_lab.export import export_peft

    made = export_peft(args.dir, args.out)
    print(f"step {made.step}: {made.tensors} adapters, {made.nbytes:,} bytes: {args.out}")
    return 0


def _plan(args: argparse.Namespace, overrides: list[str]) -> int:
    names = ("study", "max_gap", "allow", "next_study")
    if args.fastest:
        from zpp_lab.search.command import Wanted, fastest_command

        own = {name: getattr(args, name) for name in (*names, "machine", "link_gbps", "gpu_gib")}
        return fastest_command(overrides, Wanted(**own, as_json=args.json))
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} goes with --fastest")
    from zpp_lab.planner import plan_command

    return plan_command(overrides, args.gpu_gib, args.json, args.machine, args.link_gbps or "max")


def _doctor(_: argparse.Namespace, __: list[str]) -> int:
    from zpp_lab.doctor import doctor

    return doctor()


def _sync(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.dashboard import publish
    from zpp_lab.tracking.wandb_sink import sync_all

    return int(sync_all(args.dirs) + publish.sync(args.dirs) > 0)


def _dashboard(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.dashboard.command import apply_file, dashboard

    if (args.study is None) == (args.apply is None):
        raise ValueError("name a study (its folder, name or YAML file), or --apply FILE")
    if args.apply is not None:
        return apply_file(args.apply)
    return dashboard(args.study, args.out, args.project, args.entity)


def _bench(args: argparse.Namespace, rest: list[str]) -> int:
    from importlib import import_module

    return int(import_module(f"zpp_lab.bench.{args.what}").main(rest))


def _emulate(_: argparse.Namespace, rest: list[str]) -> int:
    from zpp_lab.emulate import command

    return command.main(rest)


def _build(_: argparse.Namespace, rest: list[str]) -> int:
    from zpp_lab.ops import build

    return build.main(rest)


if __name__ == "__main__":
    sys.exit(main())
