"""The page of measured speeds, and the sections of speed in a study's report."""

from __future__ import annotations

import csv
import json
import re
import warnings
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.study.fake_runs import ARMS as STUDY_ARMS
from tests.study.fake_runs import fake_config, fake_study, write_study_runs
from tests.study.report.fake_speeds import ARMS, TWINS, Arm, rows, write_speeds
from zpp_lab.cli.main import main
from zpp_lab.config.flat import flatten
from zpp_lab.runs.reader import write_study
from zpp_lab.study.judge.verdict import read_result
from zpp_lab.study.report.contents import draw, find_out, study_document
from zpp_lab.study.report.render import html
from zpp_lab.study.report.report import Report, SpeedReport, build_report, build_speed_report
from zpp_lab.study.speed.results import Measured, Predicted
from zpp_lab.study.speed.speeds import COPY

FASTER = {"qsdp": 0.9, "zeropp": 0.6, "w4": 2.4}  # gigabytes a step of the study's arms
LINKS = {(2, 2): ("12", "400"), (1, 4): ("max",)}


def bench_of(folder: Path) -> Path:
    """A bench of three of the fake study's arms, under names of its own, and of plain FSDP2."""
    arms = [ARMS[0]]
    for arm in STUDY_ARMS:
        if arm.name in FASTER:
            recipe = asdict(fake_config(arm, 1, 10, folder, None).recipe)
            config = {f"recipe.{name}": value for name, value in flatten(recipe).items()}
            arms.append(Arm(f"{arm.name}_fast", FASTER[arm.name], 0.16, config=config))
    return write_speeds(folder, rows(arms, LINKS))


def predict(measured: list[Measured]) -> tuple[list[Predicted], list[str]]:
    """Tokens/s 10 % above every measured one."""
    known = [m for m in measured if m.engine == "fsdp" or m.arm == "fsdp2"]
    return [Predicted(m.setting, m.arm, m.gbps, m.tokens_per_s * 1.1) for m in known], ["Lost: x."]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> SpeedReport:
    root = tmp_path_factory.mktemp("bench")
    write_speeds(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return build_speed_report(root, predict)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Of a study whose arms qsdp, zeropp and w4 were measured under other names."""
    root = tmp_path_factory.mktemp("runs")
    study = fake_study(STUDY_ARMS[:6])
    write_study_runs(root, study)
    write_study(root, study)
    return build_report(root, speed=bench_of(tmp_path_factory.mktemp("bench")))


def markup(html: str) -> str:
    return re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)


def test_the_page_of_a_bench_is_whole(page: SpeedReport) -> None:
    html = page.html.read_text()
    assert len(html.encode()) < 1.5e6
    assert not re.search(r"""(src|href)=["'](?!data:|#)|@import|url\(""", markup(html))
    names = re.findall(r'<script type="application/json" id="spec-(\w+)">', html)
    assert names == ["speedup", "floor"]
    for text in ("one host of 4 × NVIDIA H200", "faster below 3", "Lost: x."):
        assert text in markup(html)
    assert {p.name for p in page.figures} == {f"{n}{s}" for n in names for s in (".svg", ".pdf")}
    for path in page.figures:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_markdown_and_csv_have_the_same_numbers(page: SpeedReport) -> None:
    text = page.markdown.read_text()
    assert "12 Gb/s (1_3b, 2 × 2): w4_g84h is fastest, 20,480 tokens/s, 6.00×" in text
    assert "No limit (1_3b, 2 × 2): no arm is more than 2% faster" in text
    assert "(figures/speedup.svg)" in text
    row = (
        "| zeropp | 1_3b, 2 × 2 | 12 Gb/s | 13,653 | 4.00× | 3.92–4.08 | 0.6 | 100% | 0.6 | 21.50 |"
    )
    assert f"{row} 15,019 | +10.0% |" in text
    lines = list(csv.DictReader(page.csv.open()))
    assert len(lines) == 24
    line = next(x for x in lines if (x["arm"], x["link_gbps"]) == ("zeropp", "12"))
    assert float(line["speedup"]) == pytest.approx(4, rel=1e-4)
    assert (line["base"], line["twin"], line["over_twin"]) == ("fsdp2+node", "", "")
    assert float(line["predicted_tokens_per_s"]) == pytest.approx(15018.7, rel=1e-4)
    breaks = {x["arm"]: x for x in csv.DictReader(page.break_even.open())}
    assert 50 < float(breaks["zeropp"]["break_even_gbps"]) < 400


def test_each_quantized_arm_has_its_twin_beside_it(tmp_path: Path) -> None:
    made = build_speed_report(write_speeds(tmp_path, rows(TWINS)))
    lines = {(x["arm"], x["link_gbps"]): x for x in csv.DictReader(made.csv.open())}
    line = lines["diff", "12"]
    assert (line["base"], line["twin"]) == ("hsdp", "amsp_node")
    assert float(line["over_twin"]) == pytest.approx(4, rel=1e-3)
    assert float(line["twin_over_base"]) == pytest.approx(1.5, rel=1e-3)
    assert lines["amsp_node", "12"]["over_twin"] == ""
    assert "| Over twin | Twin over plain |" in made.markdown.read_text()
    assert "without a raw twin" not in made.markdown.read_text()


def test_speed_over_deepspeed_where_it_was_measured(tmp_path: Path) -> None:
    """Against the faster of its arms at the same link."""
    peers = [Arm("ds_zero3", 3.6, 0.4, "deepspeed"), Arm("ds_zeropp", 1.8, 0.3, "deepspeed")]
    folder = write_speeds(tmp_path, rows([*ARMS, *peers], LINKS))
    found = build_speed_report(folder)
    lines = {(x["arm"], x["nodes"], x["link_gbps"]): x for x in csv.DictReader(found.csv.open())}
    assert float(lines["zeropp", "2", "12"]["over_deepspeed"]) == pytest.approx(2)
    assert float(lines["ds_zero3", "2", "12"]["over_deepspeed"]) == pytest.approx(0.5)
    assert float(lines["zeropp", "2", "12"]["floor_s"]) == pytest.approx(0.6)
    assert "| Over DeepSpeed |" in found.markdown.read_text()
    assert "4.00× | 3.92–4.08 | 2.00× | 0.6 |" in found.markdown.read_text()


def test_without_plain_fsdp2_nothing_is_faster(tmp_path: Path) -> None:
    write_speeds(tmp_path, [row for row in rows() if row["engine"] != "fsdp2"])
    made = build_speed_report(tmp_path)
    text = made.markdown.read_text()
    assert "plain FSDP2 was not measured" in text
    assert {p.stem for p in made.figures} == {"floor"}
    assert "speed-up over" not in text.lower().split("## how it is")[0]


def test_a_study_shows_gap_against_measured_speed(report: Report) -> None:
    html = report.html.read_text()
    names = re.findall(r'<script type="application/json" id="spec-(\w+)">', html)
    assert names[:5] == ["gap", "gap_vs_bytes", "gap_vs_speed", "speedup", "floor"]
    (text,) = re.findall(r'id="spec-gap_vs_speed">(.*?)</script>', html)
    data = json.loads(text)["datasets"]
    panels = [data[f"speed{n}"] for n in range(3)]
    assert {row["arm"] for row in panels[0]} == {"zero3", "zeropp", "qsdp", "w4"}
    front = [row["arm"] for row in data["speed0_front"]]
    assert front[-1] == "zeropp"  # the fastest at 12 Gb/s: 9 times
    assert "Arms without a measurement: zero3_reordered, w6." in html
    assert "<td>zeropp_fast</td>" in html
    assert "no measurement: nothing with its settings was measured on engine=fsdp" in html


def test_a_study_keeps_its_speeds(report: Report) -> None:
    root = report.html.parent
    page = report.html.read_bytes()
    assert (root / COPY).exists()
    found = find_out(root, read_result(root))  # what another report of the study is made of
    assert html(study_document(found, draw(found))).encode() == page


def test_the_command_tells_speeds_from_studies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_speeds(tmp_path, rows(ARMS[:3], {(2, 2): ("25",)}))
    assert main(["report", str(tmp_path)]) == 0
    assert "4.00×" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--speed", str(tmp_path)]) == 2
    assert "--speed" in capsys.readouterr().err
    (tmp_path / "nothing").mkdir()
    assert main(["report", str(tmp_path / "nothing"), "--speed", str(tmp_path)]) == 2
    assert list((tmp_path / "nothing").iterdir()) == []
    assert main(["report", str(tmp_path / "absent"), "--speed", "x.csv"]) == 2


def test_of_many_arms_the_fastest_have_a_colour(tmp_path: Path) -> None:
    many = [Arm(f"arm{i}", 0.5 + 0.2 * i, 0.16) for i in range(9)]
    page = build_speed_report(write_speeds(tmp_path, rows([ARMS[0], *many], LINKS)).parent)
    found = re.search(r'id="spec-speedup">(.*?)</script>', page.html.read_text())
    assert found is not None
    drawn = json.loads(found[1])["datasets"]["links0"]
    told = {row["arm"] for row in drawn if row.get("look", row["arm"]) == row["arm"]}
    assert told == {"fsdp2", "arm0", "arm1", "arm2", "arm3"}
    assert len({row["arm"] for row in drawn}) == 10
