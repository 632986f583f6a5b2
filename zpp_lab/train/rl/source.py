"""Rollouts as batches: what `TextSource` is to a text.

A rollout is a pure function of the weights, seed and step, so a killed run makes it again. Two
things are not, and are kept in the run's folder. Rewards that took too long are noted in
late_rewards.jsonl and replayed. A run that stops between two steps of one rollout
(`rl.steps_per_rollout`) no longer has the weights that sampled it: each such rollout is written to
rollouts/ before its first step.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zpp_lab.config.schema import Config
from zpp_lab.data.packed import shuffled
from zpp_lab.data.prompts import Prompts, text_of
from zpp_lab.data.tokenizer import Tokenizer
from zpp_lab.engines.base import Batch, Batches, Engine
from zpp_lab.engines.build import pick_device
from zpp_lab.runs.metrics import Record
from zpp_lab.train.rl.advantages import (
    advantages,
    constants,
    flat_groups,
    normaliser,
    penalised,
)
from zpp_lab.train.rl.learned import Learned
from zpp_lab.train.rl.rewards import LEARNED, Reward, Scores, reward, score
from zpp_lab.train.rl.rollouts import Sampled, draw, from_first

LATE, ROLLOUTS = "late_rewards.jsonl", "rollouts"


class Judge:
    """Scores completions on rank 0; what took too long is replayed when a step is repeated."""

    def __init__(self, config: Config, folder: Path, rank: int) -> None:
        self.config, self.path, self.rank = config, folder / LATE, rank
        from_first(config, rank, self._open)
        if rank == 0 and not config.run.resume:
            self.path.unlink(missing_ok=True)

    def _open(self) -> None:
        """Load the rewards, on the rank that calls them."""
        rl, device = self.config.rl, pick_device(self.config.engine)
        self.rewards: dict[str, Reward] = {
            name: Learned(Path(str(rl.learned)), device) if name == LEARNED else reward(name)
            for name in rl.rewards
        }
        learned = self.rewards.get(LEARNED)
        if isinstance(learned, Learned):
            learned.check_same(self.path.parent, resumes=self.config.run.resume)

    def score(
        self, when: str, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> Scores:
        """Return all scores, on every rank; RewardError for a reward that fails. when: which call
        this is, the same when a step is repeated."""
        make = partial(self._score, when, prompts, completions, columns)
        return from_first(self.config, self.rank, make)

    def _score(
        self, when: str, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> Scores:
        if when in (before := self._noted()):
            return Scores(np.array(before[when]["values"]), tuple(before[when]["late"]))
        found = score(self.rewards, prompts, completions, columns, self.config.rl.timeout)
        if found.late:
            note = {"when": when, "late": found.late, "values": found.values.tolist()}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")
            print(
                f"{when}: {', '.join(found.late)} took longer than rl.timeout="
                f"{self.config.rl.timeout:g} seconds and scores 0; this run is not reproducible",
                file=sys.stderr,
                flush=True,
            )
        return found

    def _noted(self) -> dict[str, Any]:
        """Return former calls that took too long; a torn last line is of a killed run."""
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
        return {note["when"]: note for note in map(json.loads, lines)}

    @property
    def reproducible(self) -> bool:
        """Whether no reward of this run took too long."""
        return not self._noted()


@dataclass(frozen=True)
class Rollout:
    """Completions with their scores. scores: fp64 [rewards, N]; old, reference: log-probabilities
    at the targets, fp32 [N, T], by training's forward before the rollout's first step, and by the
    start's weights (empty without a penalty)."""

    first: np.ndarray  # the step before which it was made, [1]
    tokens: np.ndarray
    prompts: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    scores: np.ndarray
    old: np.ndarray
    reference: np.ndarray

    @property
    def sampled(self) -> Sampled:
        return Sampled(self.tokens, self.prompts, self.lengths, self.logprobs)


class RolloutSource:
    """Batches of sampled completions, and what a step's record says of them."""

    ahead = False  # the weights after a step sample the next one's

    def __init__(
        self,
        config: Config,
        engine: Engine,
        prompts: Prompts,
        tokenizer: Tokenizer,
        judge: Judge,
        folder: Path,
        width: int,
    ) -> None:
        """Take the engine before it has loaded a checkpoint: a KL penalty refers to its weights.
        width: tokens of the longest prompt."""
        self.config, self.engine, self.prompts, self.tokenizer = config, engine, prompts, tokenizer
        self.judge, self.folder, self.width = judge, folder / ROLLOUTS, width
        self.rl, self.length = config.rl, config.data.seq_len
        self.rollout: Rollout | None = None
        self.clipped: float | None = None  # of the last step
        shape = (self.rl.steps_per_rollout, config.train.micro_steps, config.cluster.readers)
        self.order = np.arange(self.rl.prompts * self.rl.samples).reshape(*shape, -1)
        self.start = _copy(engine) if self.rl.kl else {}
        if self.rl.temperature != 1.0:
            engine.model.temperature = self.rl.temperature  # type: ignore[attr-defined]
        if judge.rank == 0 and not config.run.resume:
            shutil.rmtree(self.folder, ignore_errors=True)

    def step(self, step: int) -> Batches:
        """Return (rank, micro-step) → the batch of one step, after a rollout where one is due."""
        first = step - step % self.rl.steps_per_rollout
        if self.rollout is None or int(self.rollout.first[0]) != first:
            self.rollout = self._made(first) if step == first else self._read(first)
            self._look_at(self.rollout)
        self.clipped = self._clipped(step)
        own, world = self.order[step - first], self.config.cluster.readers
        share = torch.tensor([len(own) * world, normaliser(self.counted[own.ravel()], self.rl)])

        def batch(rank: int, micro: int) -> Batch:
            rows = own[micro, rank]
            tokens = (torch.from_numpy(x[rows]) for x in (self.inputs, self.targets))
            return (*tokens, share, torch.from_numpy(self.constants[rows]))

        return batch

    def record(self) -> Record:
        """Return what the last step's record says of its rollout."""
        rollout, rl = self.rollout, self.rl
        assert rollout is not None
        counted, lengths = self.counted, rollout.lengths - rollout.prompts
        apart = (rollout.old - self.logprobs)[counted].astype(np.float64)
        found: Record = {
            "reward": float(self.rewards.mean()),
            "success": float((rollout.scores[0] >= 1).mean()),
            "length": float(lengths.mean()),
            "entropy": float(-rollout.old[counted].astype(np.float64).mean()),
            "mismatch": float(np.abs(apart).mean()),  # nats a token, before any correction
            "mismatch_max": float(np.abs(apart).max()),
            "flat_groups": flat_groups(self.rewards) / rl.prompts,
            "rewards": dict(zip(rl.rewards, rollout.scores.mean(1).tolist(), strict=True)),
        }
        if rl.kl:
            found["kl"] = float((rollout.old - rollout.reference)[counted].mean(dtype=np.float64))
        if self.clipped is not None:
            found["clipped"] = self.clipped
        return {"rl": found}

    def _clipped(self, step: int) -> float | None:
        """Return the share of tokens (RLOO: completions) whose ratio the next step clips, by the
        weights after `step` steps; None where telemetry is not due. The first step of a rollout
        clips none."""
        j, every = step % self.rl.steps_per_rollout, self.config.tracking.telemetry_every
        if not every or (step and (step + 1) % every):
            return None
        if not j:
            return 0.0
        rows = self.order[j].ravel()
        old, gain = self.constants[rows, 0], self.constants[rows, 1]
        change = np.where(self.counted[rows], self._log_probs(step, self.order[j]) - old, 0)
        if self.rl.by_sequence:
            change, gain = change.sum(1), gain.sum(1)
        ratio, clip = np.exp(change), self.rl.clip_ratio
        clipped = ((ratio > 1 + clip) & (gain > 0)) | ((ratio < 1 - clip) & (gain < 0))
        return float(clipped.sum() / (len(rows) if gain.ndim == 1 else self.counted[rows].sum()))

    # ------------------------------------------------------------------ one rollout

    def _made(self, first: int) -> Rollout:
        rl = self.rl
        turn = first // rl.steps_per_rollout * rl.prompts
        places = shuffled(self.config.seed, turn, rl.prompts, len(self.prompts))
        ids = places.repeat(rl.samples)
        samples = np.tile(np.arange(rl.samples), rl.prompts)
        calls = self.order.transpose(2, 0, 1, 3).reshape(1, self.config.cluster.readers, -1)
        tokens = [self.prompts.tokens[i] for i in ids]
        with self.engine.rollout(first, rl.gather) as policy:
            at = (self.width, first, self.tokenizer.end, calls)
            made = draw(self.config, policy, tokens, ids, samples, *at)
        texts = [text_of(self.tokenizer, own) for own in made.completions()]
        given = [self.prompts.texts[i] for i in ids]
        columns = self.prompts.of(ids.tolist()) | made.ids()
        scores = self.judge.score(f"step {first + 1}", given, texts, columns)
        self.inputs, self.targets, self.counted = made.rows(self.length, self.tokenizer.end)
        old = self._log_probs(first, self.order)
        reference = self._by_start(first) if rl.kl else np.zeros(0, np.float32)
        parts = (made.tokens, made.prompts, made.lengths, made.logprobs)
        rollout = Rollout(np.array([first]), *parts, scores.values, old, reference)
        if rl.steps_per_rollout > 1:
            from_first(self.config, self.judge.rank, lambda: self._write(rollout))
        return rollout

    def _look_at(self, rollout: Rollout) -> None:
        """Derive from a rollout what its steps use."""
        rl, made = self.rl, rollout.sampled
        self.inputs, self.targets, self.counted = made.rows(self.length, self.tokenizer.end)
        self.logprobs = made.by_target(self.length)
        weighted = Scores(rollout.scores).weighted([*rl.weighted.values()])
        self.rewards = weighted.reshape(rl.prompts, rl.samples)
        reference = rollout.reference if rl.kl else None
        own = penalised(self.rewards, rollout.old, reference, self.counted, rl)
        given = (rollout.old, self.logprobs, self.counted, reference)
        self.constants = constants(advantages(own, rl).ravel(), *given, rl)

    def _log_probs(self, step: int, order: np.ndarray, wire: bool = True) -> np.ndarray:
        """Return log-probabilities of the rows of `order` at their targets, fp32 [rows, T], by the
        forward of the next step; micro-batches have its shapes, and so its bits."""
        each = order.reshape(-1, order.shape[-1])
        batches = [
            (torch.from_numpy(self.inputs[rows]), torch.from_numpy(self.targets[rows]))
            for rows in each
        ]
        losses = self.engine.token_scores(step, batches, wire)[0].numpy()
        counted = self.counted[each.ravel()]
        found = np.zeros(counted.shape, np.float32)
        found[counted] = -losses
        return found

    def _by_start(self, step: int) -> np.ndarray:
        """Return log-probabilities by the weights with which the run began: of the frozen base,
        where adapters are trained."""
        now = _copy(self.engine)
        _put(self.engine, self.start)
        found = self._log_probs(step, self.order, wire=False)
        _put(self.engine, now)
        return found

    # ------------------------------------------------------------------ on the disk

    def _write(self, rollout: Rollout) -> None:
        self.folder.mkdir(exist_ok=True)
        first = int(rollout.first[0])
        whole = self.folder / f"step-{first:08}.npz"
        work = whole.with_suffix(".tmp")
        with work.open("wb") as file:
            np.savez(file, **{f.name: getattr(rollout, f.name) for f in fields(Rollout)})
        work.rename(whole)
        kept = sorted(self.folder.glob("step-*.npz"))
        steps = [p.name[5:] for p in (self.folder.parent / "checkpoints").glob("step-*")]
        oldest = min((int(s) for s in steps if s.isdigit()), default=first)
        for path in kept:
            if int(path.stem[5:]) + self.rl.steps_per_rollout < oldest:
                path.unlink()

    def _read(self, first: int) -> Rollout:
        return from_first(self.config, self.judge.rank, lambda: self._load(first))

    def _load(self, first: int) -> Rollout:
        path = self.folder / f"step-{first:08}.npz"
        if not path.is_file():
            raise ValueError(
                f"{path} is missing, from which this run would resume: restore it from a copy, or "
                "start over (run.resume=false)"
            )
        with np.load(path) as saved:
            return Rollout(**{f.name: saved[f.name] for f in fields(Rollout)})


def _weights(engine: Engine) -> dict[str, torch.Tensor]:
    from zpp_lab.engines.optim.shards import local

    return {name: local(value) for name, value in engine.state_dict()["weights"].items()}


def _copy(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in _weights(engine).items()}


@torch.no_grad()
def _put(engine: Engine, values: dict[str, torch.Tensor]) -> None:
    for name, own in _weights(engine).items():
        own.copy_(values[name])
