"""CUDA kernels against the plain-torch reference on the CPU, and their life inside torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.codecs.kernels import cases
from zpp_lab.codecs import BlockCodec, Noise, RawCodec, kernels
from zpp_lab.codecs.kernels import reference
from zpp_lab.codecs.kernels.table import incoming, noise_rows, outgoing
from zpp_lab.codecs.layout import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
NOISE = Noise(0x0123456789ABCDEF, (3, 5), (0, 1))
LENGTH = 20011  # odd: the second row starts at no multiple of 16 bytes


@pytest.fixture(autouse=True, scope="module")
def _kernels():  # type: ignore[no-untyped-def]
    kernels.configure("cuda")
    yield
    kernels.configure("auto")


def layout_of(*codecs: object, numel: int = LENGTH) -> Layout:
    names = [f"w{i}" for i in range(len(codecs))]
    return Layout.build(names, [numel] * len(codecs), codecs)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(60))
def test_random_cases_equal_the_reference(seed: int) -> None:
    cases.check(seed, kernels)


@pytest.mark.parametrize("block", [16, 32, 64, 256, 512, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize("name", cases.HARD)
def test_hard_values_equal_the_reference(name: str, block: int) -> None:
    x = cases.hard_rows(name, 2, LENGTH).flatten()
    codecs = [
        BlockCodec(bits, block, symmetric, rounding, scale)  # type: ignore[arg-type]
        for bits, symmetric, rounding, scale in itertools.product(
            (2, 3, 4, 6, 8), (True, False), ("nearest", "stochastic"), ("fp32", "bf16")
        )
    ]
    layout = layout_of(*codecs)  # 40 segments: three launches
    want = cases.poisoned(2, layout.nbytes)
    got = want.cuda()
    reference.encode(layout, [x] * len(codecs), NOISE, want)
    kernels.encode(layout, [x.cuda()] * len(codecs), NOISE, got)
    cases.same_payload("encode", layout, got, want)
    outs = [torch.empty_like(x) for _ in codecs]
    mine = [torch.full_like(x, 9.0, device="cuda") for _ in codecs]
    reference.decode(layout, want, outs)
    kernels.decode(layout, got, mine)
    for i, (a, b) in enumerate(zip(mine, outs, strict=True)):
        cases.same(f"decode {codecs[i]}", a, b)


def test_many_tiles_and_64_bit_offsets() -> None:
    """A segment beyond 2^31 elements: its far end is as right as its start."""
    numel = 2**31 + 4096
    layout = layout_of(BlockCodec(4, 64), numel=numel)
    x = torch.empty(numel, dtype=torch.bfloat16, device="cuda").normal_()
    out = cases.poisoned(1, layout.nbytes, device="cuda")
    kernels.encode(layout, [x], None, out)
    back = torch.empty_like(x)
    kernels.decode(layout, out, [back])
    tail = layout_of(BlockCodec(4, 64), numel=8192)
    want = cases.poisoned(1, tail.nbytes)
    reference.encode(tail, [x[-8192:].cpu()], None, want)
    again = torch.empty(8192, dtype=torch.bfloat16)
    reference.decode(tail, want, [again])
    cases.same("far end", back[-8192:], again)


def example_args() -> dict[str, tuple[object, ...]]:
    layout = layout_of(
        BlockCodec(4, 64, rounding="stochastic", hadamard=32), RawCodec(torch.float32)
    )
    x = [torch.randn(2 * LENGTH, device="cuda") for _ in layout.segments]
    payload = cases.poisoned(2, layout.nbytes, device="cuda")
    kernels.encode(layout, x, NOISE, payload)
    rows = noise_rows(NOISE.ranks, NOISE.rows, payload.device)
    hop = kernels.cuda.hop(layout, layout).rows
    stack = payload[None].repeat(3, 1, 1)
    sums = torch.zeros(2, layout.coded_numel, device="cuda")
    plain = torch.zeros(2, layout.numel, device="cuda")
    out = torch.zeros_like(payload)
    read, write = incoming(layout).rows, outgoing(layout).rows
    none, room = out.new_empty(0), torch.zeros(2, LENGTH, dtype=torch.bfloat16, device="cuda")
    remembers = torch.tensor([[2, 0, 0x3F800000], [0, 0, 0]])  # bf16, all of what is lost; none
    return {
        "encode": (x, write, 5, rows, out),
        "decode": (payload, read, [torch.zeros_like(t) for t in x]),
        "decode_sum": (stack, read, sums),
        "reduce": (stack, read, plain),
        "encode_sums": (sums, hop, 5, rows, out),
        "encode_remembering": (x, False, write, 5, rows, out, remembers, [none] * 2, [room, none]),
        "finish_sums": (sums, read, plain),
        "decode_sum_encode": (stack, hop, 5, rows, out),
    }


@pytest.mark.parametrize("hadamard", [0, 16, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_encode_beside_other_work_gives_the_same_bytes(dtype: torch.dtype, hadamard: int) -> None:
    """A tile's loads and the copy of the tile after next share memory: a race is rare and short."""
    numel = 1 << 26
    layout = layout_of(BlockCodec(4, max(32, hadamard), hadamard=hadamard), numel=numel)
    x = torch.randn(numel, device="cuda").to(dtype)
    first, again = (torch.zeros(1, layout.nbytes, dtype=torch.uint8, device="cuda") for _ in "ab")
    kernels.encode(layout, [x], None, first)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    other, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=dtype)
    torch.cuda.synchronize()
    for _ in range(300):
        with torch.cuda.stream(other):  # shares multiprocessors with the kernel
            matrix @ matrix
        kernels.encode(layout, [x], None, again)
        wrong += (first != again).sum()
    torch.cuda.synchronize()
    assert int(wrong) == 0


@pytest.mark.parametrize(
    "name", [n for n in kernels.cuda.NAMES if n not in ("adamw", "square_sums", "add_in_order")]
)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.zpp_lab, name).default, example_args()[name])


def test_opcheck_of_an_update() -> None:
    args = example_args()
    x, sums, write, key, rows, out, _, none, _ = args["encode_remembering"]
    kept = [torch.zeros_like(t, dtype=torch.bfloat16) for t in x]  # type: ignore[attr-defined]
    settings = torch.tensor([[2, 0, 0], [4, 0, 0]])  # less what is kept; rounded to its dtype
    call = (x, sums, write, key, rows, out, settings, kept, none)
    torch.library.opcheck(torch.ops.zpp_lab.encode_remembering.default, call)
    ok = torch.tensor(True, device="cuda")
    torch.library.opcheck(torch.ops.zpp_lab.decode.default, (*args["decode"], True, ok))


def test_opcheck_with_errors() -> None:
    args = example_args()["encode"]
    tiles = 2 * 2 * -(-LENGTH // 8192)
    errors = torch.zeros(tiles, 8, dtype=torch.float64, device="cuda")
    torch.library.opcheck(torch.ops.zpp_lab.encode.default, (*args, errors))


@pytest.mark.parametrize("name", cases.HARD)
def test_errors_of_hard_values_equal_the_reference(name: str) -> None:
    x = cases.hard_rows(name, 2, LENGTH).flatten()
    codecs = [
        RawCodec(torch.bfloat16),
        RawCodec(torch.float32),
        *(
            BlockCodec(bits, 64, symmetric)
            for bits in (2, 3, 4, 6, 8)
            for symmetric in (True, False)
        ),
        *(BlockCodec(bits, 64, scale_dtype="bf16", hadamard=32) for bits in (2, 3, 4, 6, 8)),
        *(BlockCodec(bits, 2048, rounding="stochastic") for bits in (2, 3, 4, 6, 8)),
    ]  # 22 segments and the next: two launches share one table of sums
    layout = layout_of(*codecs, BlockCodec(4, 16))
    payload = cases.poisoned(2, layout.nbytes)
    want = torch.zeros(2, len(layout.segments), 9, dtype=torch.float64)
    reference.encode(layout, [x] * len(layout.segments), NOISE, payload, want)
    got = torch.ones_like(want, device="cuda")
    out = payload.cuda().fill_(7)
    kernels.encode(layout, [x.cuda()] * len(layout.segments), NOISE, out, got)
    cases.same_payload("encode", layout, out, payload)
    cases.same("errors", got, want)


def test_inside_torch_compile() -> None:
    layout = layout_of(BlockCodec(4, 64))
    out = torch.zeros(2, layout.nbytes, dtype=torch.uint8, device="cuda")
    table = outgoing(layout).rows

    @torch.compile(fullgraph=True)
    def step(x: Tensor, table: Tensor, out: Tensor) -> Tensor:
        y = x * 2
        torch.ops.zpp_lab.encode([y], table, 0, None, out)
        return out.sum(dtype=torch.int64)

    x = torch.randn(2 * LENGTH, device="cuda")
    total = step(x, table, out)
    want = torch.zeros_like(out)
    kernels.encode(layout, [x * 2], None, want)
    cases.same("compiled", out, want.cpu())
    assert int(total) == int(want.sum(dtype=torch.int64))


def test_another_stream_is_used() -> None:
    layout = layout_of(BlockCodec(8, 64))
    x = torch.randn(2 * LENGTH, device="cuda")
    out = torch.zeros(2, layout.nbytes, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        kernels.encode(layout, [x], None, out)
    assert not side.query(), "encode must not wait for the device"
    torch.cuda.current_stream().wait_stream(side)
    want = torch.zeros_like(out)
    kernels.encode(layout, [x], None, want)
    cases.same("side stream", out, want.cpu())


def bad_calls() -> dict[str, tuple[str, object]]:
    layout = layout_of(BlockCodec(4, 64))
    x = torch.randn(2 * LENGTH, device="cuda")
    out = torch.zeros(2, layout.nbytes, dtype=torch.uint8, device="cuda")
    noisy = layout_of(BlockCodec(4, 64, rounding="stochastic"))
    shifted = torch.zeros(2 * layout.nbytes + 16, dtype=torch.uint8, device="cuda")[8:]
    shifted = shifted[: 2 * layout.nbytes].view(2, -1)
    columns = torch.randn(2, LENGTH, device="cuda").t()
    sums = torch.zeros(2, layout.coded_numel, device="cuda")
    return {
        "must be on a CUDA device": ("encode", (layout, [x.cpu()], None, out)),
        "use float32, bfloat16 or float16": ("encode", (layout, [x.double()], None, out)),
        "too short": ("encode", (layout, [x], None, out[:, :-16])),
        "must be uint8": ("encode", (layout, [x], None, out.to(torch.int8))),
        "rows of": ("encode", (layout, [torch.cat((x, x))], None, out)),
        "needs noise": ("encode", (noisy, [x], None, out)),
        "multiple of 16 bytes": ("encode", (layout, [x], None, shifted)),
        "segments, but there are": ("encode", (layout, [x, x], None, out)),
        "must be contiguous; call": ("decode", (layout, out, [columns])),
        "must be float32": ("decode_sum", (layout, out[None], sums.bfloat16())),
        "needs 3 dimensions": ("decode_sum", (layout, out, sums)),
        "needs 2 rows": ("reduce", (layout, out[None], sums[:1])),
        "or wider": ("reduce", (layout, out[None], sums[:, :-1])),
        "at least one row": ("reduce", (layout, out[None][:0], sums)),
        "ok: has the wrong dtype": ("decode", (layout, out, [x], True, sums)),
        "kept: has": (
            "encode_update",
            (layout, [x], [x[None].repeat(2, 1)], True, None, out),
        ),
    }


BAD = (
    "must be on a CUDA device", "use float32, bfloat16 or float16", "too short", "must be uint8",
    "rows of", "needs noise", "multiple of 16 bytes", "segments, but there are",
    "must be contiguous; call", "must be float32", "needs 3 dimensions", "needs 2 rows",
    "or wider", "at least one row", "ok: has the wrong dtype", "kept: has",
)  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_a_clear_error(message: str) -> None:
    name, args = bad_calls()[message]
    with pytest.raises(RuntimeError, match=message):
        getattr(kernels, name)(*args)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [(torch.float32, "must be contiguous float64"), (torch.float64, "errors: needs 12 rows")],
)
def test_bad_room_for_errors_is_a_clear_error(dtype: torch.dtype, message: str) -> None:
    errors = torch.zeros(1, 8, device="cuda", dtype=dtype)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.zpp_lab.encode(*example_args()["encode"], errors)
