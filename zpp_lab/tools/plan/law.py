"""What a recipe's bits cost in held-out loss: a formula fitted to runs from random weights.

    gap = (e^aw e^(s r) Nw^pw d^beta_w + e^ag Ng^pg d^beta_g S^(gamma u)) (P / 10^7)^alpha
                                                                              nats a token

Nw: NMSE, sum (y-x)^2 / sum x^2, of the weights that the forward gathers; r: the share of it that is
stochastically rounded. Ng: the same of the gradients, added up over the hops; u: the share of it
that is not rotated. P: parameters in blocks. d: tokens read, over 5e7. S: steps, over 1500. NMSE is
a codec's on a sample (`nmse`): normal for weights; for gradients normal with a scale that varies
log-normally, by as much as telemetry asks for after 5e7 tokens.

Gaps of unrotated 4-bit gradients grow with the number of steps on the same tokens, others do not
(eight seeds, experiments/reference/LOSS.md): so gamma acts on u. Chen et al. (2025, arXiv
2505.14302) fit quantization-aware training by powers of size, tokens and group size, Kumar et al.
(2024, arXiv 2411.04330) by bits; here NMSE covers bits, blocks and zero points.

`values` are fitted by experiments/reference/fit_law.py. A prediction says where it extrapolates; it
is then wider (`DRIFT`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from zpp_lab.codecs.base import Codec, RawCodec, SegmentNoise, encode
from zpp_lab.codecs.layout import Layout
from zpp_lab.codecs.noise import Noise
from zpp_lab.codecs.numerics import fold_sum
from zpp_lab.collectives.plan import Plan
from zpp_lab.config.load import load
from zpp_lab.config.schema import Config
from zpp_lab.config.wires import UPDATE
from zpp_lab.engines.units import ROOT
from zpp_lab.files import conf_dir, parse_json

Vector = NDArray[np.float64]
NAMES = ("aw", "pw", "ag", "pg", "s", "alpha", "beta_w", "beta_g", "gamma")
PARAMETERS, TOKENS, STEPS = 1e7, 5e7, 1500  # the formula's units
CONFIDENCE, QUANTILE = 0.90, 1.6448536  # two-sided, normal
FLOOR = 3e-4  # nats: what the order of sums alone moves a gap
# standard deviation of a gap's logarithm, for each unit of log tokens or log steps beyond those
# fitted: a fit that knew at most 5e7 tokens and 1,500 steps missed by so much after four times both
DRIFT = 0.5
SAMPLE = (8, 2**15)  # rows of a sample and elements of a row
TAIL = 0.35  # standard deviation of a gradient's log-scale


@dataclass(frozen=True)
class Errors:
    """Of a recipe on a model: NMSE of weights and of gradients, 0 to about 1, the share of the
    weights' that is stochastically rounded and that of the gradients' that is not rotated."""

    weights: float
    grads: float
    stochastic: float = 0.0
    unrotated: float = 0.0

    @classmethod
    def of(cls, plan: Plan) -> Errors:
        hops = range(len(plan.recipe.hops))
        weights = [u.forward for u in plan.units]
        random = _mean(weights, lambda c: nmse(c, False) if c.stochastic else 0.0)
        whole = _mean(weights, lambda c: nmse(c, False))
        every = [[u.hops[h] for u in plan.units] for h in hops]
        grads = sum(_mean(hop, lambda c: nmse(c, True)) for hop in every)
        plain = sum(_mean(hop, lambda c: 0.0 if c.rotation else nmse(c, True)) for hop in every)
        shares = random / whole if whole else 0.0, plain / grads if grads else 0.0
        return cls(whole, grads, *shares)


def _mean(layouts: Sequence[Layout], of: Callable[[Codec], float]) -> float:
    """Over all elements."""
    numel: Counter[Codec] = Counter()
    for segment in (s for layout in layouts for s in layout.segments):
        numel[segment.codec] += segment.numel
    return sum(n * of(codec) for codec, n in numel.items()) / (numel.total() or 1)


def nmse(codec: Codec, grads: bool) -> float:
    """Return a codec's error on a sample like gradients or weights; 0 without a codec."""
    if isinstance(codec, RawCodec):
        return 0.0
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLE, generator=draw)
    if grads:
        x *= torch.exp(TAIL * torch.randn(SAMPLE, generator=draw))
    rows = tuple(range(SAMPLE[0]))
    noise = SegmentNoise(Noise(1, rows, rows), 0) if codec.stochastic else None
    error = codec.decode(encode(codec, x, noise), SAMPLE[1]) - x
    lost, whole = (fold_sum(t.double().square().flatten()) for t in (error, x))
    return float(lost / whole)


@dataclass(frozen=True)
class Cell:
    """A measured gap, nats a token, with its standard error; parameters are those in blocks."""

    name: str
    errors: Errors
    parameters: float
    tokens: float
    steps: float
    gap: float
    error: float


@dataclass(frozen=True)
class Prediction:
    """Nats a token; `low` to `high` has the share CONFIDENCE. `beyond`: where it extrapolates."""

    gap: float
    low: float
    high: float
    beyond: tuple[str, ...] = ()


@dataclass(frozen=True)
class Law:
    """`values` and their `covariance` in the order of NAMES; `misfit`: the standard deviation of a
    gap around the law, as a share of it; `ranges`: of what was fitted, by quantity."""

    values: list[float]
    covariance: list[list[float]]
    misfit: float
    cells: int
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(NAMES)
        shaped = len(self.values) == len(self.covariance) == n
        if not shaped or any(len(row) != n for row in self.covariance):
            raise ValueError(
                f"a scaling law has {n} values, {', '.join(NAMES)}, and their covariance"
            )

    def predict(self, errors: Errors, parameters: float, tokens: float, steps: float) -> Prediction:
        """Predict the gap of a run with so many parameters in blocks, tokens and steps."""
        cell = Cell("", errors, parameters, tokens, steps, 0.0, 1.0)
        at = np.array(self.values)
        gap, slope = gap_at(at, cell), slope_at(at, cell)
        outside = max(self._outside("tokens", tokens), self._outside("steps", steps))
        unknown = (self.misfit**2 + (DRIFT * outside) ** 2) * gap**2
        spread = math.sqrt(slope @ np.array(self.covariance) @ slope + unknown)
        factor = math.exp(QUANTILE * spread / gap) if gap else 1.0  # a gap's logarithm is normal
        order = QUANTILE * FLOOR
        return Prediction(gap, gap / factor - order, gap * factor + order, self._beyond(cell))

    def _outside(self, name: str, value: float) -> float:
        """How far a quantity lies beyond those fitted, as a logarithm; 0 within."""
        least, most = self.ranges.get(name, (value, value))
        return math.log(max(least / value, value / most, 1.0))

    def _beyond(self, cell: Cell) -> tuple[str, ...]:
        found = []
        for name, value in quantities(cell).items():
            if value and name not in self.ranges:
                found.append(f"{name} {value:.3g}, none fitted")
            elif value:
                low, high = self.ranges[name]
                if not low / 1.1 <= value <= high * 1.1:
                    found.append(f"{name} {value:.3g}, fitted {low:.3g} to {high:.3g}")
        return tuple(found)


def load_law(path: Path | None = None) -> Law:
    """Read the published law, conf/law/reference.json, or another. ValueError if damaged."""
    path = path or conf_dir() / "law" / "reference.json"
    stored = parse_json(path, "run experiments/reference/law.py to write it again")
    try:
        return load(Law, stored)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; run experiments/reference/law.py to write it") from None


def predicted(config: Config, plan: Plan) -> Prediction | None:
    """Predict the gap of a run; None where the law says nothing."""
    if not covers(config, plan):
        return None
    return load_law().predict(Errors.of(plan), *extent(config, plan))


def covers(config: Config, plan: Plan) -> bool:
    """Return whether a law says something of a run: it learns text, from random weights, trains all
    of them, and sends nothing later that bits have lost."""
    model = config.model
    others = model.start or model.weights == "pretrained" or config.run.start_from
    later = plan.memories or (plan.recipe.kept and plan.recipe.asks(UPDATE))
    return config.task == "text" and not (others or model.lora.on or later)


def extent(config: Config, plan: Plan) -> tuple[int, int, int]:
    """Return a run's parameters in blocks, the tokens that all ranks read, and its steps."""
    train, blocks = config.train, [u.unit for u in plan.units if u.unit.name != ROOT]
    parameters = sum(p.parts * p.numel for unit in blocks for p in unit.parameters)
    tokens = train.steps * train.micro_steps * train.batch_size * config.data.seq_len
    return parameters, tokens * config.cluster.readers, train.steps


def quantities(cell: Cell) -> Mapping[str, float]:
    return {
        "parameters": cell.parameters,
        "tokens": cell.tokens,
        "steps": cell.steps,
        "weights' NMSE": cell.errors.weights,
        "stochastically rounded weights' NMSE": cell.errors.weights * cell.errors.stochastic,
        "gradients' NMSE": cell.errors.grads,
    }


def gap_at(at: Vector, cell: Cell) -> float:
    v = dict(zip(NAMES, at.tolist(), strict=True))
    errors, gap, log_d = cell.errors, 0.0, math.log(cell.tokens / TOKENS)
    if errors.weights:
        rounding = v["s"] * errors.stochastic
        power = v["pw"] * math.log(errors.weights)
        gap += math.exp(v["aw"] + rounding + power + v["beta_w"] * log_d)
    if errors.grads:
        steps = v["gamma"] * errors.unrotated * math.log(cell.steps / STEPS)
        power = v["pg"] * math.log(errors.grads)
        gap += math.exp(v["ag"] + power + v["beta_g"] * log_d + steps)
    return gap * math.exp(v["alpha"] * math.log(cell.parameters / PARAMETERS))


def slope_at(at: Vector, cell: Cell) -> Vector:
    step = 1e-5
    unit = np.eye(len(at)) * step
    return np.array([(gap_at(at + e, cell) - gap_at(at - e, cell)) / (2 * step) for e in unit])
