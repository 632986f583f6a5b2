"""What `zpp_lab` gives to other programs: the same objects whatever was imported before."""

from __future__ import annotations

import subprocess
import sys

import zpp_lab

CODE = """
import os, torch.distributed.fsdp, types
child = os.fork()
import zpp_lab
if child == 0:  # it imports another module first
    import zpp_lab.train.trainer
config = zpp_lab.recipe("zeropp", "recipe.weights.bits=6")
assert (config.name, config.weights.bits) == ("zeropp", 6)
import zpp_lab.engines.build, zpp_lab.study.run.launch
from zpp_lab import init, load, recipe, shard
from zpp_lab import api
from zpp_lab.study import frames
for name in zpp_lab.__all__:
    found = getattr(zpp_lab, name)
    assert isinstance(found, types.FunctionType), (name, found)
    assert found is getattr(frames if name == "load" else api, name)
assert child == 0 or os.waitpid(child, 0)[1] == 0
"""


def test_public_names_are_functions_in_every_order_of_imports() -> None:
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tab_completion_lists_public_names() -> None:
    code = "import zpp_lab; print(*dir(zpp_lab))"
    listed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    names = listed.stdout.split()
    assert set(zpp_lab.__all__) <= set(names)
    assert not {"Any", "TYPE_CHECKING"} & set(names)


def test_no_public_name_is_a_modules() -> None:
    """Python would put the module in the function's place when it is first imported."""
    from importlib.util import find_spec

    assert [name for name in zpp_lab.__all__ if find_spec(f"zpp_lab.{name}")] == []
