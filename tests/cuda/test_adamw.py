"""The update kernel against the plain-torch optimizer: on the host its operator, plans, addresses
and arithmetic, compiled for tensors on the CPU; where there is a GPU the kernel itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from tests.cuda.host import load_operators, on_gpu, with_operators
from zpp_lab.codecs import kernels
from zpp_lab.codecs.kernels import backend
from zpp_lab.codecs.planes import split
from zpp_lab.config.schema import TrainConfig
from zpp_lab.engines.optim import CompactAdamW, StateKind
from zpp_lab.engines.optim import update as kernel
from zpp_lab.engines.optim.build import AdamW, adamw
from zpp_lab.engines.optim.shards import gradients as gradients_of
from zpp_lab.engines.optim.states import noise_key, row_noise

Masters = Literal["fp32", "split"]
KINDS: list[StateKind] = ["bf16", "8bit"]
KEPT: list[tuple[StateKind, Masters]] = [
    *((kind, "fp32") for kind in KINDS),
    *((kind, "split") for kind in ("fp32", *KINDS)),
]
# rows of whole vectors and others, of one block, more and less; in fp32; a rank without rows
SHAPES = [(5, 700), (3, 1288), (4, 5, 60), (40, 16), (7, 53), (2, 256), (9,), (16,), (0, 64)]
MANY = SHAPES + 60 * [(2, 24)]  # more than one launch takes


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """The operator for tensors on the CPU."""
    load_operators("host_adamw", tmp_path_factory.mktemp("host"))
    return torch.ops.zpp_host.adamw.default


@pytest.fixture
def by_host(host: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on the host's operator takes the place of plain torch.

    Plain torch gets square roots that are rounded as a GPU's are: on a CPU, MKL's are off by one
    place now and then.
    """
    monkeypatch.setattr(torch, "_foreach_sqrt_", exact_roots)

    def switch() -> None:
        monkeypatch.setattr(kernel, "serves", lambda weight: True)
        monkeypatch.setattr(kernel, "operator", lambda: host)

    return switch


def exact_roots(tensors: list[Tensor]) -> None:
    for t in tensors:
        t.copy_(t.double().sqrt())


def started(shapes: list[tuple[int, ...]], device: str, shift: int = 0) -> dict[str, nn.Parameter]:
    """`shift`: elements from an aligned address to where each parameter starts."""
    made = torch.Generator().manual_seed(0)
    found = {}
    for i, shape in enumerate(shapes):
        t = torch.randn(shape, generator=made)
        room = torch.zeros(t.numel() + shift, device=device)[shift:]
        found[str(i)] = nn.Parameter(room.view(shape).copy_(t))
    return found


def gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    """Of all sizes, with zeros, down to what underflows."""
    made = torch.Generator().manual_seed(step)
    for p in parameters.values():
        g = torch.randn(p.shape, generator=made)
        g = g * torch.logspace(-18, 9, p.numel()).view(p.shape)
        if g.ndim > 1 and len(g) > 2:
            g[1, ..., :30] = 0
            g[2] = 0
        p.grad = torch.zeros_like(p).copy_(g)  # in bf16, if it is a high plane


def results(
    kind: StateKind,
    device: str = "cpu",
    ok: Tensor | None = None,
    shapes: list[tuple[int, ...]] = MANY,
    shift: int = 0,
    bad: float = 1.0,
    masters: Masters = "fp32",
) -> list[Tensor]:
    """Weights and states after some steps; one gradient of the last but one is `bad`. All but the
    first are clipped."""
    parameters = started(shapes, device, shift)
    train = TrainConfig(
        optimizer_state=kind, weight_decay=0.1, lr=3e-3, masters=masters, param_dtype="bf16"
    )
    low = in_planes(parameters, shift) if masters == "split" else {}
    optimizer = adamw(parameters, train, 4, low=low)
    for step in range(6):
        gradients(parameters, step)
        if step == 4:
            parameters["0"].grad[3, 300] *= bad  # type: ignore[index]
        assert isinstance(optimizer, CompactAdamW)
        factor = torch.tensor(0.37, device=device) if step else None
        optimizer.begin(step, ok, factor)
        optimizer.update(gradients_of(optimizer))
    return kept(optimizer, parameters) + [t.cpu() for t in low.values()]


def in_planes(parameters: dict[str, nn.Parameter], shift: int) -> dict[str, Tensor]:
    """Make parameters high planes; returns the low ones. Some weights lie at ties of bf16."""
    found = {}
    for name, p in parameters.items():
        values = p.detach().clone()
        values.view(torch.int32).view(-1)[::5].bitwise_and_(-65536).bitwise_or_(0x8000)
        planes = split(values)
        rooms = [torch.zeros(p.numel() + shift, dtype=t.dtype, device=p.device) for t in planes]
        high, low = (r[shift:].view(p.shape) for r in rooms)
        p.data = high.copy_(planes[0])
        found[name] = low.copy_(planes[1])
    return found


def kept(optimizer: AdamW, parameters: dict[str, nn.Parameter]) -> list[Tensor]:
    states = [optimizer.state[p] for p in parameters.values()]
    tensors = [s[k] for s in states for k in sorted(s)]
    return [t.detach().cpu() for t in [*parameters.values(), *tensors]]


def same(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@with_operators
@pytest.mark.parametrize(("kind", "masters"), KEPT)
@pytest.mark.parametrize("ok", [None, True, False])
def test_the_hosts_bits(
    kind: StateKind, masters: Masters, ok: bool | None, by_host: Callable[[], None]
) -> None:
    flag = None if ok is None else torch.tensor(ok)
    wanted = results(kind, ok=flag, masters=masters)
    by_host()
    same(wanted, results(kind, ok=flag, masters=masters))


@with_operators
@pytest.mark.parametrize(("kind", "masters"), KEPT)
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_addresses_that_vectors_cannot_have(
    kind: StateKind, masters: Masters, shift: int, by_host: Callable[[], None]
) -> None:
    wanted = results(kind, shapes=SHAPES, masters=masters)
    by_host()
    same(wanted, results(kind, shapes=SHAPES, shift=shift, masters=masters))


@with_operators
@pytest.mark.parametrize(("kind", "masters"), KEPT)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(
    kind: StateKind, masters: Masters, bad: float, by_host: Callable[[], None]
) -> None:
    wanted = results(kind, shapes=SHAPES, bad=bad, masters=masters)
    assert sum(int((~t.isfinite()).sum()) for t in wanted) > 2
    by_host()
    same(wanted, results(kind, shapes=SHAPES, bad=bad, masters=masters))


@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_multiplies_fp32_gradients_as_torch_does(kind: StateKind) -> None:
    ends, factor = [], torch.tensor(0.37)
    for within in (True, False):
        parameters = started(SHAPES, "cpu")
        optimizer = adamw(parameters, TrainConfig(optimizer_state=kind), 4)
        assert isinstance(optimizer, CompactAdamW)
        gradients(parameters, 1)
        grads = gradients_of(optimizer)
        if not within:
            torch._foreach_mul_([*grads.values()], factor)
        optimizer.begin(1, None, factor if within else None)
        optimizer.update(grads)
        ends.append(kept(optimizer, parameters))
    same(*ends)


@with_operators
@pytest.mark.parametrize("offset", range(9))
def test_noise_from_any_place_on(offset: int, host: Callable[..., None]) -> None:
    """A second moment at rest, 1 + half a step of bf16: its lower bits decide by the noise."""
    columns, key = 264, noise_key(7, 3)
    state = [torch.zeros(2, columns, dtype=torch.bfloat16) for _ in range(2)]
    weight, rate = torch.zeros(2, columns), torch.ones(1)
    grad = torch.full((2, columns), 1 + 2.0**-8)
    call(host, [weight], [], [grad], [state[0]], [state[1]], [offset], key, rate, None)
    noise = row_noise(7, 3, offset + columns, torch.device("cpu"))[offset:]
    up = (noise & 0xFFFF) >= 0x8000
    assert torch.equal(state[0].float(), torch.where(up, 1 + 2.0**-7, 1.0).expand(2, -1))


def call(host: Callable[..., None], *tensors: Any, scales: list[Tensor] | None = None) -> None:
    """The operator with beta1 = 0, beta2 = 0.5 and eps = 1e-8, without decay."""
    weights, low, grads, first, second, offsets, key, rates, factor = tensors
    signed = key - 2**64 if key >= 2**63 else key
    lists = (weights, low, grads, first, second, scales or [], scales or [])
    host(*lists, offsets, signed, rates, rates, None, factor, 0, 0.5, 1e-8, 1)


@with_operators
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"grads": [torch.zeros(2, 31)]}, "grads: has 62 elements, needs 64"),
        ({"grads": [torch.zeros(2, 32).half()]}, "grads: has the wrong dtype"),
        ({"grads": []}, "need one each for 1 weights"),
        ({"second": [torch.zeros(2, 32)]}, "second: has the wrong dtype"),
        ({"first": [torch.zeros(2, 32).half()]}, "use float32, bfloat16 or uint8"),
        ({"first": [torch.zeros(2, 32).byte()]}, "scales: need 1"),
        ({"weights": [torch.zeros(32, 2).t()]}, "weights: must be contiguous"),
        ({"low": [torch.zeros(2, 32).short()]}, "weights: has the wrong dtype"),
        ({"low": 2 * [torch.zeros(2, 32)]}, "low: need none, or 1"),
        ({"factor": torch.ones(1).double()}, "factor: has the wrong dtype"),
        ({"offsets": [-1]}, "offsets: must be from 0"),
        ({"rates": torch.zeros(0)}, "rates: has 0 elements, needs 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], problem: str, host: Callable[..., None]
) -> None:
    moment = torch.zeros(2, 32, dtype=torch.bfloat16)
    good = {
        "weights": [torch.zeros(2, 32)],
        "low": [],
        "grads": [torch.ones(2, 32)],
        "first": [moment],
        "second": [moment.clone()],
        "offsets": [0],
        "key": 0,
        "rates": torch.ones(1),
        "factor": None,
    }
    call(host, *good.values())
    assert moment.any()
    with pytest.raises(RuntimeError, match=problem):
        call(host, *(good | change).values())


@on_gpu
@pytest.mark.parametrize(("kind", "masters"), KEPT)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_kernels_bits(kind: StateKind, masters: Masters, held: bool, shift: int) -> None:
    """The last but one step has a gradient that is not finite."""
    ok = torch.tensor(not held, device="cuda")
    shapes = [*MANY, (300, 5120), (1, 3_000_000)]
    ends = []
    for name in ("cuda", "reference"):
        kernels.configure(name)  # type: ignore[arg-type]
        try:
            ends.append(results(kind, "cuda", ok, shapes, shift, float("nan"), masters))
            ends.append(results(kind, "cuda", ok, shapes, shift, masters=masters))
        finally:
            backend._state.backend = "auto"
    same(ends[0], ends[2])
    same(ends[1], ends[3])
