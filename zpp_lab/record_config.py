"""How records of a JSON-lines file become text to finetune on; no torch.

A record is `{"prompt": …, "completion": …}`, or `{"messages": [{"role": …, "content": …}, …]}`,
under the names that the config gives.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class RecordConfig:
    """Names of a record's fields, the marks around a chat's turns, and what fits a sequence."""

    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"  # where a record has it, it is a chat
    turn_open: str = "<|{role}|>\n"  # before a turn's content; {role} is the turn's
    turn_close: str = "\n"  # after it; of an assistant's turn the loss counts it
    pack: bool = True  # several records in a sequence; they see those before them in it
    too_long: Literal["truncate", "drop", "refuse"] = "truncate"  # truncate: prompts, from the left

    def __post_init__(self) -> None:
        names = (self.prompt, self.completion, self.messages)
        if not all(names) or len(set(names)) < 3:
            raise ValueError(
                "data.records: prompt, completion and messages must be three names of fields"
            )
