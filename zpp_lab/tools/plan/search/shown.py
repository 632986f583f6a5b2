"""A search's answer as tables for a terminal and as JSON, and each plan as Hydra's overrides."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from zpp_lab.config.load import written
from zpp_lab.config.parser import link_name
from zpp_lab.config.schema import Config, RecipeConfig
from zpp_lab.tools.plan.cost.show import graph_line, host_lacks
from zpp_lab.tools.plan.cost.timeline import HOST
from zpp_lab.tools.plan.planner import NO_GPU, sequences
from zpp_lab.tools.plan.search.fastest import TIE, Answer, Problem, Timed
from zpp_lab.tools.plan.search.limits import UNLIMITED
from zpp_lab.tools.plan.search.space import PLAIN, Candidate, named_recipes
from zpp_lab.train.memory.buffers import GIB

COLUMNS = ("", "plan", "step, s", "tokens/s", "× plain", "GiB", "bound by", "verdict")
WIDTH = 110  # of a table that says something
VERDICTS = {
    "chosen": "chosen",
    "memory": "too large",
    "loss": "loss",
    "not measured": "not measured",
    "allowed": "slower",
    "plain": "plain",
    "twin": "raw twin",
}
NO_LOSS = (
    "Loss was not considered: --study DIR, a finished study's folder, restricts the search to "
    "recipes that it found on par."
)
MILD = (
    "Without --study the loss gap of fewer bits is unknown, so weights keep 8 bits or more and "
    "gradients 4, as in ZeRO++; --study DIR uses a finished study's verdicts, --allow untested "
    "removes the limit."
)


def plan_overrides(given: Sequence[str], config: Config, candidate: Candidate) -> list[str]:
    """Return all that `zpp-lab train` needs: `given` without what the plan replaces, then the plan,
    which runs as real processes. config: what `given` composes to."""
    own = ["engine=fsdp", *recipe_overrides(candidate.recipe), *_knobs(config, candidate)]
    replaced = {_key(word) for word in own} | {"engine.name"}
    chosen = [w for w in given if _key(w) not in replaced and not _key(w).startswith("recipe.")]
    return [*chosen, *own]


def recipe_overrides(recipe: RecipeConfig) -> list[str]:
    """Return `recipe=NAME` for one of conf/recipe, else all settings unlike recipe=base."""
    if recipe in named_recipes():
        return [f"recipe={recipe.name}"]
    own, usual = _flat(recipe), _flat(PLAIN)
    changed = [f"recipe.{key}={written(own[key])}" for key in own if own[key] != usual.get(key)]
    name = f"recipe.name={written(recipe.name)}"
    return ["recipe=base", name, *(word for word in changed if word != name)]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _flat(recipe: RecipeConfig) -> dict[str, Any]:
    """Settings by dotted name, two deep: lists and a codec's options stay whole."""
    flat: dict[str, Any] = {}
    for key, value in asdict(recipe).items():  # type: ignore[call-overload]
        inner = value if isinstance(value, dict) else {None: value}
        flat |= {f"{key}.{k}" if k else key: v for k, v in inner.items()}
    return flat


def _knobs(config: Config, candidate: Candidate) -> list[str]:
    knobs = candidate.knobs
    wanted = {
        "engine.blocks_per_unit": (config.engine.blocks_per_unit, knobs.blocks_per_unit),
        "model.checkpoint_activations": (
            config.model.checkpoint_activations,
            knobs.checkpoint_activations,
        ),
        "model.loss_chunk": (config.model.loss_chunk, knobs.loss_chunk),
        "train.optimizer_state": (config.train.optimizer_state, knobs.optimizer_state),
    }
    return [f"{key}={written(now)}" for key, (was, now) in wanted.items() if was != now]


def tempting(answer: Answer) -> list[Timed]:
    """Return plans faster than the chosen plan and measured by no arm, each recipe once."""
    found = [*([answer.promising] if answer.promising else []), *answer.unmeasured]
    return list({id(t.option.candidate.recipe): t for t in found}.values())


def rows(answer: Answer) -> Iterator[tuple[Timed, str, str]]:
    """Yield (plan, kind, why) fastest first; the kinds are chosen, memory, loss, not measured,
    plain, twin and allowed. A plan that is two of them has the first."""
    seen: set[int] = set()
    for timed, kind, why in sorted(_all(answer), key=lambda row: row[0].step_s):
        if id(timed) not in seen:
            seen.add(id(timed))
            yield timed, kind, why


def _all(answer: Answer) -> Iterator[tuple[Timed, str, str]]:
    problem = answer.problem
    for timed in answer.too_large:
        yield timed, "memory", f"needs {_lacking(problem, timed)}"
    for timed in answer.too_lossy:
        yield timed, "loss", timed.option.ruling.why
    for timed in tempting(answer):
        yield timed, "not measured", timed.option.ruling.why
    yield answer.chosen, "chosen", answer.chosen.option.ruling.why
    for timed in answer.plains:
        fits = "" if answer.fits(timed) else f"; does not fit: needs {_lacking(problem, timed)}"
        best = "the strongest plain plan" if timed is answer.plain else "plain"
        yield timed, "plain", f"{best}, as torch trains by itself{fits}"
    if answer.twin:
        fits = ""
        if not answer.fits(answer.twin):
            fits = f"; does not fit: needs {_lacking(problem, answer.twin)}"
        yield answer.twin, "twin", f"the chosen plan without codecs{fits}"
    for timed in answer.next_best:
        yield timed, "allowed", timed.option.ruling.why


def _lacking(problem: Problem, timed: Timed) -> str:
    """Say what a plan needs of a memory that is too small."""
    if problem.over(timed.option)[0] or problem.host is None:
        return f"{_gib(timed)} GiB of {problem.device / GIB:.1f}"
    own, there = timed.option.host / GIB, problem.host / GIB
    return f"{own:.1f} GiB of host memory a rank of {there:.1f}"


def label(candidate: Candidate) -> str:
    """Return a plan in a few words."""
    knobs = candidate.knobs
    parts = [candidate.recipe.name]
    parts += [f"units of {n} blocks"] if (n := knobs.blocks_per_unit) > 1 else []
    parts += ["recompute"] if knobs.checkpoint_activations else []
    parts += [f"chunk {knobs.loss_chunk}"] if knobs.loss_chunk else []
    parts += [f"{knobs.optimizer_state} states"] if knobs.optimizer_state != "fp32" else []
    return ", ".join(parts)


def show(answer: Answer, given: Sequence[str], config: Config, console: Console) -> None:
    """Print the table, the chosen plan as a command, and what was not considered.

    given: the user's overrides, config: what they compose to.
    """
    chosen, problem = answer.chosen, answer.problem
    console.print(_table(answer))
    for i, (_, kind, why) in enumerate(rows(answer), 1):
        if why == UNLIMITED.why:  # said below, once
            continue
        lead = f"{i} rejected: " if kind in ("memory", "loss", "not measured") else f"{i} "
        console.print(lead + why, highlight=False)
    console.print(
        f"{chosen.time.tokens_per_s:,.0f} tokens/s in steps of {chosen.step_s:.4g} s, "
        f"{answer.speed_up(chosen):.2f} × {label(answer.plain.option.candidate)}, the strongest "
        f"plain plan{_apart(answer)}; {_gib(chosen)} of "
        f"{problem.device / GIB:.1f} GiB a GPU. Predicted, by the figures of "
        f"{problem.machine.name}:",
        highlight=False,
    )
    words = shlex.join(plan_overrides(given, config, chosen.option.candidate))
    console.print(f"zpp-lab train {words}", soft_wrap=True, highlight=False)
    for line in notes(answer):
        console.print(line, style="dim", highlight=False)


def _apart(answer: Answer) -> str:
    """What bits and what the partition bring, where the chosen plan has codecs."""
    if answer.twin is None:
        return ""
    bits = answer.twin.step_s / answer.chosen.step_s
    return f" (bits bring {bits:.2f} ×, the partition {answer.speed_up(answer.twin):.2f} ×)"


def notes(answer: Answer) -> list[str]:
    """Return what a reader must know besides the table."""
    limit, problem, chosen = answer.problem.limit, answer.problem, answer.chosen
    lines = [NO_GPU] * problem.assumed
    config = chosen.option.candidate.config(problem.base)
    lines.append(graph_line(config, problem.machine, {link_name(problem.link_gbps): chosen.time}))
    if problem.host is None and (own := chosen.option.host):
        lines.append(
            f"In host memory, each rank: {own / GIB:.1f} GiB. Assuming that it suffices: "
            "engine.host_gib limits it."
        )
    if limit is not None:
        lines += _loss_notes(answer)
    else:
        lines.append(NO_LOSS if answer.problem.untested else MILD)
    lacks = host_lacks(answer.problem.machine)
    if lacks and answer.chosen.time.bound == HOST:
        lines.append(lacks)
    if limit is not None and tempting(answer):
        lines.append("Faster, but not measured by a study: measure those as arms of one.")
    lines += [f"Not predicted: {fault}." for fault in answer.without_figures]
    lines.append(
        f"{answer.plans:,} plans searched, {answer.predicted:,} predicted. Plans within 1 % count "
        "as equally fast; of those the one with the most bits is chosen."
    )
    return lines


def _loss_notes(answer: Answer) -> list[str]:
    limit, base = answer.problem.limit, answer.problem.base
    assert limit is not None
    lines = [
        f"Loss: within {limit.share:.2%} of the baseline's, by study {limit.study.name} "
        f"({limit.folder})."
    ]
    if limit.undecided:
        lines.append("--allow undecided: arms with an undecided gap are allowed too.")
    if limit.waiting:
        lines.append(f"Provisional: controls without a verdict, {', '.join(limit.waiting)}.")
    other = differences(limit.measured[0].config, base)
    if other:
        lines.append(
            f"The study trained with {'; '.join(other)}: its verdicts may not transfer to these "
            "settings."
        )
    return lines


def differences(study: Config, plan: Config) -> list[str]:
    """Return what else differs between a study's runs and the plan, and could change a verdict."""

    def key_settings(c: Config) -> dict[str, str]:
        return {
            "model": c.model.preset,
            "cluster": f"{c.cluster.nodes} × {c.cluster.gpus_per_node}",
            "sequence": str(c.data.seq_len),
            "tokens a step": str(c.tokens_per_step),
            "param_dtype": c.train.param_dtype,
            "reduce_dtype": c.train.reduce_dtype,
            "adapters": f"rank {c.model.lora.rank}" if c.model.lora.on else "none",
        }

    there, here = key_settings(study), key_settings(plan)
    return [f"{k} {there[k]} (here {here[k]})" for k in there if there[k] != here[k]]


def as_dict(answer: Answer, given: Sequence[str], config: Config) -> dict[str, Any]:
    """Return everything shown; memory in bytes, times in seconds."""
    return {
        "machine": answer.problem.machine.name,
        "link_gbps": answer.problem.link_gbps,
        "device": answer.problem.device,
        "host_limit": answer.problem.host,
        "loss_considered": answer.problem.limit is not None,
        "untested": answer.problem.untested,
        "max_gap": answer.problem.limit.share if answer.problem.limit else None,
        "plans": answer.plans,
        "predicted": answer.predicted,
        "chosen": _entry(answer, answer.chosen, given, config),
        "plain": _entry(answer, answer.plain, given, config),
        "twin": _entry(answer, answer.twin, given, config) if answer.twin else None,
        "rows": [
            _entry(answer, timed, given, config) | {"kind": kind, "why": why}
            for timed, kind, why in rows(answer)
        ],
        "notes": notes(answer),
    }


def _entry(answer: Answer, timed: Timed, given: Sequence[str], config: Config) -> dict[str, Any]:
    option = timed.option
    return {
        "recipe": option.candidate.recipe.name,
        "overrides": plan_overrides(given, config, option.candidate),
        "time": asdict(timed.time),
        "peak": option.peak,
        "host": option.host,
        "fits": answer.fits(timed),
        "speed_up": answer.speed_up(timed),
        "ruling": asdict(option.ruling),
    }


def _table(answer: Answer) -> Table:
    base, problem = answer.problem.base, answer.problem
    link = "" if problem.link_gbps is None else f", {problem.link_gbps:g} Gbit/s a node"
    cluster = f"{base.cluster.nodes} × {base.cluster.gpus_per_node}"
    table = Table(
        title=f"{base.model.preset} on {cluster} {problem.machine.name}{link}, {sequences(base)}, "
        "fastest first",
        title_justify="left",
    )
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if 2 <= i <= 5 else "left", no_wrap=True)
    for i, (timed, kind, _) in enumerate(rows(answer), 1):
        time = timed.time
        table.add_row(
            str(i),
            label(timed.option.candidate),
            f"{time.step_s:.4g}",
            f"{time.tokens_per_s:,.0f}",
            f"{answer.speed_up(timed):.2f}",
            _gib(timed),
            time.bound,
            _verdict(answer, timed, kind),
            style="bold" if kind == "chosen" else None,
        )
    return table


def _verdict(answer: Answer, timed: Timed, kind: str) -> str:
    close = timed.step_s <= answer.chosen.step_s * (1 + TIE)
    return "as fast" if kind == "allowed" and close else VERDICTS[kind]


def _gib(timed: Timed) -> str:
    return f"{timed.option.peak / GIB:.1f}"
