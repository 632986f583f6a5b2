"""The plugin of examples/tagc: where its sums are exact, its bytes, what goes wrong in it, and its
recipe under both engines, found as an installed package is."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from tests.engines import fsdp_parity
from tests.engines.fsdp_world import run_world
from zpp_lab.cli.main import main
from zpp_lab.codecs import build_codec, encode, registry
from zpp_lab.codecs.contract import check_codec
from zpp_lab.codecs.packing import unpack
from zpp_lab.collectives.recipe import Recipe
from zpp_lab.config.codec import CodecConfig
from zpp_lab.config.compose import compose
from zpp_lab.config.model import LoraConfig
from zpp_lab.config.schema import ClusterConfig, RecipeConfig
from zpp_lab.engines.build import plan_of
from zpp_lab.files import OWN_CONF

TAGC = Path(__file__).parents[2] / "examples" / "tagc"
sys.path.append(str(TAGC))

from tagc_codec import STEPS, SketchCodec, murmur3  # noqa: E402

ONE_BIT, FOUR_BITS = SketchCodec(64), SketchCodec(64, index_bits=4)
N = 2**17  # 2048 blocks, where TAGC has 1152


def kept_by(ranks: int, apart: bool = False) -> Tensor:
    """fp32 [ranks, 1, N], of each rank nearly a fifth not 0: what TAGC is set to keep. `apart`: of
    two ranks, each its own, and together as many as of two that choose by themselves."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ranks, 1, N, generator=draw) * 1e-3
    where = torch.rand(1 if apart else ranks, 1, N, generator=draw)
    share = 0.18 if apart else 0.198
    least = torch.arange(ranks).view(-1, 1, 1) * share if apart else 0.0
    return torch.where((where >= least) & (where < least + share), x, 0.0)


def error(codec: SketchCodec, x: Tensor) -> float:
    """Of the sum of all ranks' rows: squared, over that of the true sum."""
    y = codec.decode_sum(torch.stack([encode(codec, row) for row in x]), x.shape[-1])
    return float((y - x.sum(0)).square().sum() / x.sum(0).square().sum())


def wrong_bits(codec: SketchCodec, x: Tensor) -> float:
    """Share of elements of which the added index says other than that some rank keeps them."""
    rows = torch.stack([encode(codec, row) for row in x])
    index = codec.decode_sum(rows, N, rotated=True)[:, sum(codec.rotation.widths(N)[:2]) :]
    bits = unpack((index.long() & 255).to(torch.uint8), N, codec.index_bits) != 0
    return float((bits != (x != 0).any(0)).float().mean())


def test_hashes_are_murmur3() -> None:
    """By vectors that are published with it."""
    assert [murmur3(0, 0), murmur3(0x87654321, 0)] == [0x2362F9DE, 0xF55B516B]


def test_it_takes_the_bytes_that_tagc_moves_and_more_than_bf16() -> None:
    """Its defaults: a sketch of half the elements in fp32, and an index that is all-reduced."""
    assert SketchCodec(1024).nbytes(2**20) / 2**20 == 2.25
    assert SketchCodec(1024, index_bits=4).nbytes(2**20) / 2**20 == 3.0
    row = torch.randn(1, 3 * 64 + 36)
    assert ONE_BIT.nbytes(228) == 2 * 64 * 4 + 36 * 4 + 2 * 32
    assert torch.equal(ONE_BIT.decode(encode(ONE_BIT, row), 228)[:, 192:], row[:, 192:])


def test_what_one_rank_sends_comes_back_but_for_last_bits() -> None:
    x = kept_by(1)
    assert error(ONE_BIT, x) < 1e-13
    assert wrong_bits(ONE_BIT, x) == 0


def test_two_ranks_add_up_exactly_where_no_element_is_kept_by_both() -> None:
    """The claim of a lossless sum, at the published settings."""
    x = kept_by(2, apart=True)
    assert error(ONE_BIT, x) < 1e-11
    assert wrong_bits(ONE_BIT, x) == 0


def test_ones_of_two_ranks_carry_into_the_next_element() -> None:
    """Ranks that choose by themselves share a twenty-fifth of all elements. The bit of each is lost
    and often another one set; by then the sketch is read wrong. Four bits keep sums exact."""
    x = kept_by(2)
    assert 0.07 < wrong_bits(ONE_BIT, x) < 0.09
    assert error(ONE_BIT, x) > 0.5
    assert wrong_bits(FOUR_BITS, x) == 0
    assert error(FOUR_BITS, x) < 1e-11


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_three_ranks_fill_the_sketch_beyond_what_peels(ranks: int) -> None:
    """1 - 0.8³ of all elements are kept by some rank, in half as many places: 0.98 each."""
    x = kept_by(ranks)
    for codec in (ONE_BIT, FOUR_BITS):
        assert error(codec, x) > 0.5
    assert wrong_bits(ONE_BIT, x) > 0.1
    larger = SketchCodec(64, ratio=1.01, index_bits=4)
    assert (error(larger, x) < 1e-9) == (1 - 0.8**ranks < 0.8)


def test_its_thresholds_keep_more_than_it_is_set_to() -> None:
    """A table of 25 steps, of which the one below is taken; so two ranks are too many as well."""
    x = torch.randn(2, 1, N, generator=torch.Generator().manual_seed(1)) * 1e-3
    kept = torch.stack([ONE_BIT.kept(row) for row in x])
    assert {float(row[row != 0].abs().min().log10().floor()) for row in kept} == {-3.0}
    assert 0.31 < float((kept != 0).float().mean()) < 0.33
    assert float(kept[kept != 0].abs().min()) >= STEPS[STEPS.index(1e-3)]
    assert error(FOUR_BITS, kept) > 0.5
    assert torch.equal(ONE_BIT.sent(x[0]), kept[0])  # what a memory takes for sent


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_of_one_rank_is_seen_by_all(bad: float) -> None:
    x = kept_by(2)
    x[1, 0, 5] = bad
    assert error(ONE_BIT, x) != error(ONE_BIT, x)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package's entry points as pip writes them down, and its folder for --config-dir."""
    project = tomllib.loads((TAGC / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["zpp_lab.codecs"].items()
    lines = ["[zpp_lab.codecs]", *(f"{name} = {value}" for name, value in points)]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(OWN_CONF, str(TAGC))
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()


@pytest.mark.parametrize(
    "codec", [SketchCodec(16), SketchCodec(64, sparsity=0.0, ratio=3.0, index_bits=4)]
)
def test_it_keeps_the_contract(codec: SketchCodec) -> None:
    check_codec(codec)


def test_without_the_plugin_the_command_that_installs_it_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for setting in ("recipe=tagc", "recipe.grads.codec=sketch"):
        assert main(["train", setting, "--dry-run"]) == 2
        assert "pip install ./examples/tagc" in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_wrong_settings_name_the_fix() -> None:
    sketch = CodecConfig(codec="sketch", options={"ratio": 3})
    assert build_codec(sketch, torch.float32) == SketchCodec(ratio=3)
    for said, fix in (
        ({"block_size": 100}, "block_size=100"),
        ({"options": {"sparsity": 1}}, "sparsity=1"),
        ({"options": {"ratio": 1}}, "ratio=1"),
        ({"options": {"index_bits": 8}}, "index_bits=8"),
        ({"bits": 4}, "'bits'"),
    ):
        with pytest.raises(ValueError, match=fix):
            build_codec(CodecConfig(codec="sketch", **said), torch.float32)  # type: ignore[arg-type]


@pytest.mark.usefixtures("installed")
def test_gradients_in_one_hop_alone_can_have_it() -> None:
    sketch, cluster = CodecConfig(codec="sketch"), ClusterConfig(nodes=2, gpus_per_node=2)
    Recipe(RecipeConfig(grads=sketch), cluster)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"hops": 2, "grads": sketch}, r"recipe\.hops=1"),
        ({"shard": "node", "grads": sketch}, r"recipe\.shard=node"),
        ({"weights": sketch}, r"recipe\.grads"),
    ]
    for settings, fix in wrong:
        with pytest.raises(ValueError, match=fix):
            Recipe(RecipeConfig(**settings), cluster)
    with pytest.raises(ValueError, match=r"base_codec\.codec=sketch"):
        Recipe(RecipeConfig(), cluster, lora=LoraConfig(rank=4, base_codec=sketch))


@pytest.mark.usefixtures("installed")
def test_its_recipe_sends_more_than_bf16() -> None:
    """2.25 bytes an element of the matrices in blocks, at the settings that are published."""
    own = ["model=10m", "cluster=1x2", "train.param_dtype=bf16", "train.reduce_dtype=bf16"]
    tagc, raw = (
        sum(map(sum, plan_of(compose([f"recipe={name}", *own])).step_bytes().values()))
        for name in ("tagc", "zero3")
    )
    assert raw < tagc < 1.1 * raw


def compared() -> dict[str, str]:
    recipe = yaml.safe_load((TAGC / "recipe" / "tagc.yaml").read_text())
    fsdp_parity.CASES["tagc"] = recipe, {**fsdp_parity.BF16, "micro_steps": 2}
    return fsdp_parity.compare(["tagc"], 1, 2, steps=3)


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_engines_agree_on_its_recipe() -> None:
    """Also on what its encoders remember, which counts on what they have sent."""
    assert run_world(2, compared) == {"tagc": ""}
