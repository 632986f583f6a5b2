"""Settings of the data: corpus, tokenizer, sequences. No torch."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from zpp_lab.config.codec import STRICT, Count, Positive, need

TURNS = "turns"  # in place of a template's file
TASKS = ("addition", "sums")  # made by data/tasks.py, so they need no file


@dataclass(frozen=True, config=STRICT)
class RecordConfig:
    """How records of a JSON-lines file become text to finetune on. A record is `{"prompt": …,
    "completion": …}`, or `{"messages": [{"role": …, "content": …}, …]}`, under the field names
    given here. Chats go through the template of a Hugging Face tokenizer; for others, or where
    marks are given here, marks stand around turns."""

    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"  # where a record has it, it is a chat
    chosen: str = "chosen"  # with data.pairs: completions of one prompt, texts or messages
    rejected: str = "rejected"
    template: str | None = None  # of chats: a Jinja file, `turns`, or None: the tokenizer's own
    turn_open: str = "<|{role}|>\n"  # before a turn's content; {role} is the turn's
    turn_close: str = "\n"  # after it; of an assistant's turn the loss counts it
    pack: bool = True  # several records in a sequence; they see those before them in it; no pairs
    too_long: Literal["truncate", "drop", "refuse"] = "truncate"  # truncate: prompts, from the left

    def __post_init__(self) -> None:
        names = (self.prompt, self.completion, self.messages)
        if not all(names) or len(set(names)) < 3:
            raise ValueError("data.records: give prompt, completion and messages different names")
        pair = (self.prompt, self.chosen, self.rejected)
        if not all(pair) or len(set(pair)) < 3:
            raise ValueError("data.records: give prompt, chosen and rejected different names")
        if self.template not in (None, TURNS) and self._has_marks:
            raise ValueError(
                f"data.records.template={self.template}: only data.records.template={TURNS} reads "
                "turn_open and turn_close; leave them out"
            )

    @property
    def marks_turns(self) -> bool:
        """Whether turn_open and turn_close stand around turns whatever the tokenizer has."""
        return self.template == TURNS or (self.template is None and self._has_marks)

    @property
    def _has_marks(self) -> bool:
        kind = type(self)
        return (self.turn_open, self.turn_close) != (kind.turn_open, kind.turn_close)


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    name: Literal["stdlib", "installation", "text", "jsonl", "hf", "addition", "sums"] = "stdlib"
    path: str | None = None  # file or folder for `text`, dataset for `hf`, more `installation`
    suffixes: list[str] = field(default_factory=lambda: [".py"])  # of files of `installation`
    mask_prompt: bool = True  # jsonl: the loss counts completions only
    records: RecordConfig = field(default_factory=RecordConfig)  # jsonl
    pairs: bool = False  # records are a prompt with a chosen and a rejected completion: task=reward
    # addition, sums: share of the answers in which one digit is random, to be unlearnt by rewards
    wrong: Annotated[float, Field(ge=0, le=1)] = 0.0
    subset: str | None = None  # of an `hf` dataset
    split: str = "train"  # of an `hf` dataset
    column: str = "text"  # where a row of an `hf` dataset keeps its text
    tokenizer: Literal["bytes", "bpe", "hf"] = "bytes"
    tokenizer_path: str | None = None  # hf: a tokenizer.json, or its folder
    end_token: str | None = None  # hf: closes a document; None: the tokenizer's eos_token
    vocab_size: int = 256  # of a BPE to train
    bpe_every: Positive = 1  # a BPE learns from every n-th training document
    seq_len: Annotated[int, Field(ge=2)] = 64
    draw_ranks: Count = 0  # a step's sequences are those of so many ranks; 0: of the cluster's
    heldout_every: Annotated[int, Field(ge=2)] = 20  # every n-th file or record is held out
    max_bytes: Count = 0  # 0 reads all
    cache_dir: str = "data_cache"

    def __post_init__(self) -> None:
        need(
            self.draw_ranks == 0 or not self.has_records,
            f"data.draw_ranks={self.draw_ranks} with data.name={self.name}: its records are drawn "
            "by the cluster's ranks; use 0",
        )
        need(
            all(s.startswith(".") and len(s) > 1 for s in self.suffixes) and bool(self.suffixes),
            f"data.suffixes={self.suffixes}: name endings of files, such as [.py,.h]",
        )
        need(
            self.name in ("stdlib", "installation", *TASKS) or bool(self.path),
            f"data.name={self.name} needs data.path (a file, a folder or a dataset's name)",
        )
        need(
            self.tokenizer != "bpe" or self.vocab_size > 256,
            f"data.tokenizer=bpe needs data.vocab_size above 256, not {self.vocab_size}",
        )
        need(
            (self.tokenizer == "hf") == bool(self.tokenizer_path),
            "data.tokenizer=hf and data.tokenizer_path (a tokenizer.json, or its folder) need "
            "each other: set both or neither",
        )
        need(
            self.tokenizer == "hf" or self.records.template in (None, TURNS),
            f"data.records.template={self.records.template} needs data.tokenizer=hf",
        )
        need(
            self.tokenizer == "hf" or self.end_token is None,
            "data.end_token: only data.tokenizer=hf reads it; set that, or leave it out",
        )
        need(
            self.name in TASKS or self.wrong == 0,
            f"data.wrong={self.wrong:g}: only data.name=addition or sums reads it; leave it out",
        )
        need(
            self.has_records or not self.pairs,
            f"data.pairs=true with data.name={self.name}: only records are pairs; use data=jsonl "
            "with data.path, data=addition or data=sums",
        )
        need(
            not self.pairs or self.wrong == 0,
            f"data.wrong={self.wrong:g} with data.pairs=true: the chosen answer is right; leave "
            "data.wrong out",
        )
        need(
            not self.pairs or self.mask_prompt,
            "data.mask_prompt=false with data.pairs=true: a pair's texts are scored at their ends, "
            "and no token counts; leave data.mask_prompt out",
        )

    @property
    def has_records(self) -> bool:
        """Whether documents are records, of prompts and completions."""
        return self.name in ("jsonl", *TASKS)
