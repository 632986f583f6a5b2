"""Hugging Face's Trainer and accelerate train a sharded model as they train another: losses of DDP,
bits of a user's own loop, checkpoints, evaluations; settings that cannot work are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.fsdp_world import run_world
from tests.test_loops import GUIDE
from tests.trainer_jobs import FAST, SLOW, jobs
from zpp_lab.engines.fsdp.loops.hugging_face import refuse

Answers = dict[str, Any]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    found: Answers = run_world(2, jobs, str(tmp_path_factory.mktemp("trainer")), True)
    return found


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    found: Answers = run_world(2, jobs, str(tmp_path_factory.mktemp("trainer")), False)
    return found


@pytest.fixture
def found(request: pytest.FixtureRequest) -> Any:
    """The answer of one case of a job."""
    kind, name = request.param
    return request.getfixturevalue(kind)[name]


def cases(job: str) -> pytest.MarkDecorator:
    """Run a test with the answers of all of the job's cases."""
    quick = [pytest.param(("fast", n), id=n) for n in FAST if n.split()[0] == job]
    marks = pytest.mark.slow
    rest = [pytest.param(("slow", n), id=n, marks=marks) for n in SLOW if n.split()[0] == job]
    assert quick or rest
    return pytest.mark.parametrize("found", quick + rest, indirect=True)


@cases("losses")
def test_losses_are_those_of_ddp(found: Any) -> None:
    """Held-out losses too; norms are sums in another order."""
    (ours, norms), (theirs, others) = found["zero3"], found["ddp"]
    assert (len(theirs), len(others)) == (10 + 3, 10)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert norms == pytest.approx(others, rel=1e-4)


@pytest.mark.slow
def test_losses_under_autocast_are_near_those_of_ddp(slow: Answers) -> None:
    assert slow["autocast"]["zero3"][0] == pytest.approx(slow["autocast"]["ddp"][0], rel=0.02)


@cases("bits")
def test_bits_are_those_of_an_own_loop(found: Any) -> None:
    """With one micro-step and two; weights are compared on the ranks."""
    for ours, theirs in found:
        assert ours == theirs
    assert found[1] == found[3] == [4, 4]


@cases("accelerated")
def test_accelerates_loop_accumulates_and_clips(found: Any) -> None:
    assert found["accelerate"] == found["own"]
    assert found["accelerate"] == pytest.approx(found["ddp"], rel=found["loose"])


@cases("scaled")
def test_a_scaler_skips_a_step_that_overflows_on_one_rank(found: Any) -> None:
    assert found["zero3"] == pytest.approx(found["ddp"], rel=1e-3)
    assert found["zero3"][1::2] == [2.0**14] * 2 + [2.0**13] * 3


@cases("saved")
def test_checkpoints_hold_whole_weights_and_resume_to_the_bit(found: Any) -> None:
    assert found["step"] == 6
    assert len(found["on"][0]) == 6
    assert found["resumed"] == found["on"]
    assert len(set(found["class"])) == 1
    assert not found["class"][0].startswith("FSDP")


@cases("generated")
def test_generation_in_evaluation_leaves_no_trace(found: Any) -> None:
    losses, tokens, more = found["sharded"]
    assert losses == found["quiet"][0]
    assert len(tokens) == 3
    if found["exact"]:
        assert losses == pytest.approx(found["ddp"][0], rel=1e-5)
        assert tokens == found["ddp"][1]
        assert more == found["ddp"][2]


@cases("refusals")
def test_settings_that_cannot_work_are_refused(found: Any) -> None:
    for setting, (kind, text) in found.items():
        assert kind == "ValueError", setting
        assert setting in text


@pytest.mark.parametrize("name", ["deepspeed", "fsdp", "megatron_lm", "parallelism_config"])
def test_what_a_launcher_says_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse()
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    with pytest.raises(ValueError, match=name):
        refuse()


@cases("same")
def test_other_ways_of_starting_give_the_same_losses(found: Any) -> None:
    """torch_compile, model_init and peft's adapters."""
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_guides_table_names_settings_that_exist() -> None:
    """Those of TrainingArguments."""
    from transformers import TrainingArguments

    table = GUIDE.split("| setting | effect |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = {name.strip(" `") for row in rows for name in row.split(",")}
    known = set(TrainingArguments.__dataclass_fields__)
    others = {"model_init", "hyperparameter_search"}  # of Trainer
    assert {n for n in named - others if not n.endswith("*")} <= known
    assert len(named) > 12
