"""`zpp-lab train`, `study` and `prepare`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from zpp_lab.cli.adding import Add, names_of, takes_settings
from zpp_lab.cli.results import finish
from zpp_lab.config.parser import whole
from zpp_lab.train.time_slice import PAUSED, UNFINISHED, seconds

if TYPE_CHECKING:
    from zpp_lab.config.schema import Config
    from zpp_lab.tools.plan.dry_run import Machine

ALONE = "with --arms: judge these runs alone, while other arms and seeds run elsewhere"
PIECE = "stop within this time (8m, 480s), with checkpoints; the same command resumes"
PER_GPU = "runs that share a GPU; 0: as many as fit (default: the study's). See zpp-lab mps"
MACHINE = (
    "with --dry-run: predict seconds from a file written by `bench calibrate`, or a name such as "
    "h200"
)
INFO = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
LINK = "with --machine: link speed of a node in Gbit/s (default: max, as inside a node)"
TRAIN = """Into run.dir, or runs/RECIPE/seedN. The same command goes on with an interrupted run; a
folder that holds a run with other settings is left alone.

    zpp-lab train recipe=zeropp train.steps=100
    zpp-lab train recipe.name=mine recipe.weights.bits=4 recipe.weights.block_size=64
    zpp-lab train -m recipe.weights.bits=null,4 seed=1,2     # into runs/sweep-DATE"""
DEEPSPEED = """Prints the command line of the same training, what DeepSpeed would do without a word,
and every key of the file that was not carried over. Nothing is trained."""
STUDY = """Trains every arm with every seed, prints the verdicts and writes report.html into --dir.
Finished runs are not repeated. Settings are for all arms.

    zpp-lab study first
    zpp-lab study first --seeds 1,2,3,4,5,6,7,8
    zpp-lab study bits --dry-run"""


def add_training(add: Add) -> None:
    _add_train(add)
    _add_study(add)
    _add_deepspeed(add)
    tokens = add("prepare", "make a study's token files before its runs need them", _prepare)
    tokens.add_argument("name", help="a study's name, or the path of a YAML file")
    takes_settings(tokens)


def _add_deepspeed(add: Add) -> None:
    found = add("from-deepspeed", "translate a DeepSpeed config", _from_deepspeed, DEEPSPEED)
    found.add_argument("file", type=Path, help="a DeepSpeed config, a JSON file")
    found.add_argument(
        "--nodes", type=whole(1), help="nodes of the cluster, where the file does not say"
    )
    found.add_argument(
        "--gpus-per-node",
        type=whole(1),
        help="GPUs per node of the cluster, where the file does not say",
    )


def _from_deepspeed(args: argparse.Namespace, _: list[str]) -> int:
    from zpp_lab.engines.deepspeed.translate import translate

    print(translate(args.file, args.nodes, args.gpus_per_node).text())
    return 0


def _add_train(add: Add) -> None:
    train = add(
        "train",
        "train one run, or several with -m",
        _train,
        f"{TRAIN}\n\n{names_of('recipe', 'Recipes')}",
    )
    train.add_argument(
        "-m", "--multirun", action="store_true", help="run every combination of a=1,2 b=x,y"
    )
    train.add_argument("--for", dest="piece", metavar="TIME", help=PIECE)
    train.add_argument(
        "--dry-run", action="store_true", help="print settings that differ from defaults, and bytes"
    )
    train.add_argument("--full", action="store_true", help="with --dry-run: print every setting")
    train.add_argument("--machine", metavar="FILE", help=MACHINE)
    train.add_argument("--link-gbps", metavar="SPEED", help=LINK)
    as_hydra = train.add_argument_group("print the config as Hydra does, without training")
    as_hydra.add_argument(
        "--cfg", "-c", choices=["job", "hydra", "all"], help="print what Hydra composes"
    )
    as_hydra.add_argument(
        "--package", "-p", metavar="NAME", help="with --cfg: print one part of it"
    )
    as_hydra.add_argument("--resolve", action="store_true", help="with --cfg: resolve every ${...}")
    as_hydra.add_argument(
        "--info", nargs="?", const="all", choices=INFO, help="print where each setting comes from"
    )
    takes_settings(train)


def _add_study(add: Add) -> None:
    study = add(
        "study",
        "train the arms of a study, then judge and report",
        _study,
        f"{STUDY}\n\n{names_of('study', 'Studies')}",
    )
    study.add_argument("name", help="a study's name, or the path of a YAML file")
    study.add_argument("--dir", type=Path, help="where to put the runs (default: runs/NAME)")
    study.add_argument("--jobs", type=whole(0), help="runs side by side (default: cores or GPUs)")
    study.add_argument("--runs-per-gpu", type=whole(0), metavar="N", help=PER_GPU)
    study.add_argument("--seeds", help="seeds instead of the study's, such as 1,2,3,4")
    study.add_argument("--arms", help="only these arms, such as zero3*,broken, and their baselines")
    study.add_argument("--alone", action="store_true", help=ALONE)
    study.add_argument("--for", dest="piece", metavar="TIME", help=PIECE)
    study.add_argument(
        "--no-report",
        action="store_true",
        help="do not write a report; zpp-lab report DIR does it later",
    )
    study.add_argument(
        "--retry", action="store_true", help="repeat runs that diverged or failed too often"
    )
    study.add_argument(
        "--dry-run", action="store_true", help="show runs, cost and progress without training"
    )
    study.add_argument("--machine", metavar="FILE", help=MACHINE)
    study.add_argument("--link-gbps", metavar="SPEED", help=LINK)
    study.add_argument("--watch", action="store_true", help="show a live table of a running study")
    study.add_argument("--launcher", help="a Hydra launcher (slurm, joblib) for the runs")
    takes_settings(study)


def _until(piece: str | None) -> float | None:
    """The unix time that `--for` means, counted from now."""
    return None if piece is None else time.time() + seconds(piece)


def _train(args: argparse.Namespace, overrides: list[str]) -> int:
    until = _until(args.piece)
    _check_dry(args)
    if args.full and (args.multirun or not args.dry_run):
        raise ValueError("--full works only with --dry-run of one run, without -m")
    if any(word.startswith("hardware=slurm") for word in overrides) and not (
        args.multirun or args.dry_run or args.cfg or args.info
    ):
        raise ValueError("hardware=slurm submits jobs: add -m, as for a sweep of one run or more")
    flags = _of_hydra(args)
    if flags:
        from zpp_lab.study.run.multirun import show

        if args.multirun:
            raise ValueError(
                f"{flags[0]} works with one run only: leave out -m, or give -m --dry-run"
            )
        show(overrides, *flags)
        return 0
    if args.multirun:
        if args.dry_run:
            from zpp_lab.study.run.multirun import planned_sweep
            from zpp_lab.tools.plan.dry_run import dry_sweep

            dry_sweep(planned_sweep(overrides), _machine(args))
            return 0
        if until is not None:
            raise ValueError("--for works with one run or a study: leave out -m, or write a study")
        return _sweep(overrides)
    from zpp_lab.config.compose import bare_model, compose, has_ended, run_dir

    config = compose([*overrides, *([] if until is None else [f"run.until={until!r}"])])
    if note := bare_model(overrides):
        print(note, file=sys.stderr)
    if args.dry_run:
        _show_settings(config, args)
        return 0
    from zpp_lab.train.inputs import check_run
    from zpp_lab.train.launch.place import placed

    folder, ended = run_dir(config), has_ended(config)
    one_of_many = config.engine.ranked and placed(os.environ)
    checked = not ended and not one_of_many  # those look together, once they have met
    if checked:
        check_run(config)
    from zpp_lab.train.launch.launcher import launch, leave, queue_again

    try:
        summary = launch(config, checked)
    except _ends() as error:
        return _failed(error)
    paused = summary.get("outcome") == UNFINISHED
    if paused:
        print("stopped before the end; the same command resumes from here")
    elif summary:  # rank 0, when somebody else started the ranks
        result = f"held-out loss {summary['heldout_loss']:.4f}"
        if "heldout_success" in summary:
            result = f"held-out success {summary['heldout_success']:.1%}"
        if "perplexity" in summary:  # runs of older versions have none
            result += f", perplexity {summary['perplexity']:.4g},"
        result += f" after {summary['steps']} step{'' if summary['steps'] == 1 else 's'}"
        print(f"{result}: {folder}{', trained before' if ended else ''}")
    leave(at_exit=paused)  # a rank ends with 0: torchrun and srun take all else for a failure
    if why := queue_again(summary):
        print(f"zpp-lab train: {why}", file=sys.stderr)
    return PAUSED if paused else 0


def _of_hydra(args: argparse.Namespace) -> list[str]:
    """The words of Hydra's own command that are asked for."""
    if args.cfg is None and (args.package is not None or args.resolve):
        raise ValueError("--package and --resolve work only with --cfg, such as --cfg job")
    flags = [] if args.cfg is None else ["--cfg", args.cfg]
    flags += [] if args.package is None else ["--package", args.package]
    return [*flags, *["--resolve"] * args.resolve, *(["--info", args.info] if args.info else [])]


def _show_settings(config: Config, args: argparse.Namespace) -> None:
    """Print settings as YAML, those that differ from the defaults or all of them, and as comments
    what travels in bits, bytes, memory and time."""
    from zpp_lab.config.compose import run_dir
    from zpp_lab.config.flat import carried, changed_settings, every_setting
    from zpp_lab.config.schema import Config
    from zpp_lab.config.wires import shares
    from zpp_lab.train.inputs import check_recipe, check_shape, planned

    check_shape(config)
    check_recipe(config)
    plans, cluster = planned(config), config.cluster
    print(
        f"# recipe {config.recipe.name}, model {config.model.path or config.model.preset}, "
        f"{cluster.nodes} × {cluster.gpus_per_node} ranks, {config.train.steps} steps, into "
        f"{run_dir(config)}"
    )
    shown = every_setting(config) if args.full else changed_settings(config, Config())
    print(yaml.safe_dump(shown, sort_keys=False) if shown else "", end="")
    if not args.full:
        print("# other settings have their defaults, which --full shows")
        print(f"# bits: {carried(config)}" if carried(config) else "# no bits: all wires are raw")
    if plans or config.engine.ranked or args.machine:  # of the rest nobody waits for torch
        from zpp_lab.tools.plan.dry_run import summary_line

        print(f"# {summary_line(config, _machine(args))}")
    for phase, (_, plan) in zip(config.phases, plans or (), strict=False):
        if config.engine.name != "deepspeed":
            made = shares(plan.quantized_share()).items()
            when = f" after {phase.first} steps" if phase.first else ""
            each = ", ".join(f"{kind} {text}" for kind, text in made)
            print(f"# quantized, of a step's bytes{when}: {each}")


def _sweep(overrides: list[str]) -> int:
    from zpp_lab.study.run.multirun import multirun

    try:
        return multirun(overrides)
    except _ends() as error:
        return _failed(error)


def _ends() -> tuple[type[Exception], ...]:
    """How a run ends badly with all said: its own traceback would tell a user no more."""
    from zpp_lab.engines.base import NonFiniteError
    from zpp_lab.train.evaluation import DivergedError
    from zpp_lab.train.launch.launcher import RankFailed

    return RankFailed, DivergedError, NonFiniteError


def _failed(error: Exception) -> int:
    diverged = isinstance(error, ArithmeticError)
    print(f"zpp-lab train: {'the run diverged: ' * diverged}{error}", file=sys.stderr)
    return 1


def _study(args: argparse.Namespace, overrides: list[str]) -> int:
    from zpp_lab.config.compose import compose, load_study
    from zpp_lab.config.load import setting_of
    from zpp_lab.study import Launch, run_study
    from zpp_lab.study.run.plan import heldout_default, matching, some_arms

    seeds = _numbers(args.seeds) if args.seeds is not None else []
    changes: dict[str, object] = {"seeds": seeds} if seeds and not args.alone else {}
    if args.runs_per_gpu is not None:
        changes["runs_per_gpu"] = args.runs_per_gpu
    hydra = [word for word in overrides if setting_of(word).startswith(("hydra.", "hydra/"))]
    if hydra and args.launcher is None and "hardware=slurm" not in overrides:
        raise ValueError(
            f"{hydra[0]}: Hydra's settings work only with --launcher, such as --launcher slurm"
        )
    study = load_study(args.name, changes, [word for word in overrides if word not in hydra])
    if args.alone and not args.arms:
        raise ValueError("--alone works only with --arms, such as --arms w8 --alone")
    patterns = args.arms.split(",") if args.arms is not None else []
    only = matching(study, patterns) if args.alone else []
    if patterns and not args.alone:
        study = some_arms(study, patterns)
    root = args.dir or Path("runs") / study.name
    if "hardware=slurm" in study.overrides:
        args.launcher = args.launcher or "slurm"
    if args.watch:
        from zpp_lab.study.run.progress import show

        show(root, study)
        return 0
    _check_launched(args)
    _check_dry(args)
    study = heldout_default(study, root, compose, slurm=args.launcher == "slurm")
    launch = Launch(
        jobs=args.jobs or 0,
        launcher=args.launcher,
        settings=hydra,
        arms=only,
        seeds=seeds if args.alone else [],
        until=_until(args.piece),
    )
    if args.dry_run:
        from zpp_lab.tools.plan.dry_run import dry_run

        dry_run(study, root, launch, _machine(args))
        return 0
    outcome = run_study(study, root, launch, retry=args.retry)
    if not (outcome.unfinished or outcome.waiting or args.no_report):
        finish(root, study)
    return outcome.exit_code


def _check_launched(args: argparse.Namespace) -> None:
    for name in ("jobs", "runs_per_gpu") if args.launcher is not None else ():
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option} applies to runs on this machine: leave it out, or leave --launcher "
                "out, whose own settings limit parallel runs (conf/hydra/launcher)"
            )


def _check_dry(args: argparse.Namespace) -> None:
    for name in ("machine", "link_gbps"):
        if getattr(args, name) is not None and not args.dry_run:
            raise ValueError(f"--{name.replace('_', '-')} works only with --dry-run")


def _machine(args: argparse.Namespace) -> Machine | None:
    """Whose figures predict seconds, where some are named."""
    link = None
    if args.link_gbps is not None:
        from zpp_lab.tools.plan.cost.show import links

        if args.machine is None:
            raise ValueError("--link-gbps works only with --machine")
        (link, *more) = links(args.link_gbps)
        if more:
            raise ValueError(f"--link-gbps {args.link_gbps}: use one speed, or max")
    if args.machine is None:
        return None
    from zpp_lab.tools.plan.dry_run import Machine

    return Machine(args.machine, link)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds {text!r}: use whole numbers, such as 1,2,3") from None


def _prepare(args: argparse.Namespace, overrides: list[str]) -> int:
    from zpp_lab.config.compose import compose, load_study
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
