"""Files of prompts: `{"prompt": ...}` or `{"messages": [...]}`, with any further columns of each as its facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from feedback import selectors
from feedback.storage.problem_rows import RowReader
from feedback.transfer import formats
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.records import FormatRefused, RowError, RowRefused, check_json, messages_of
from rl.datasets.evidence import Prompt
from rl.datasets.feedback_types import Evidence
from rl.datasets.file_evidence import FileEvidence

PROMPTS = ("prompt", "messages", "question", "problem", "instruction")
"""Columns that hold the prompt, the first that is there counts."""

PLAIN = ("trl", "openai", "llamafactory", "table")
"""Formats whose rows may be prompts with columns of their own; a file of another format its own reader takes apart."""

PREFERENCE_COLUMNS = ("chosen", "rejected", "conversations", "preferred_output")
"""Columns of rows that are preferences: their prompts are not in a column."""

NON_FACT_COLUMNS = ("state", "tools", "facts", "completion", "response", "id", "agent")
"""Columns that are not facts: what was answered before teaches nothing where the policy answers itself."""

SAMPLE = 20
"""Rows looked at to tell a file of prompts from others."""


def holds_prompts(path: Path) -> bool:
    """True if most of a file's rows are prompts with facts beside them. Raises FormatRefused for no file."""
    try:
        if formats.detect(path) not in PLAIN:
            return False
    except FormatRefused:
        pass  # of no format of feedback: prompts, perhaps
    seen = [row.value for row in islice(rows(path), SAMPLE) if not isinstance(row, RowRefused)]
    objects = [row for row in seen if isinstance(row, Mapping)]
    prompt_count = sum(any(row.get(name) for name in PROMPTS) for row in objects)
    return 2 * prompt_count > len(seen) and not any(set(row) & set(PREFERENCE_COLUMNS) for row in objects)


class PromptFile(FileEvidence):
    """The prompts of a file and what is known of each; no feedback."""

    def __init__(self, agent: str, path: Path) -> None:
        self.agent, self.path, self.format, self.ratings_path = agent, path, "prompts", None
        self.feedback_count = self.simulated_count = 0
        self.rows = RowReader(agent, "dataset")
        self._prompts: dict[str, Prompt] = {}
        self._unrated, self._silent, self._traces, self._numbers = [], [], {}, 0

    def evidence(self, left_out: Counter[str]) -> Iterator[Evidence]:
        """Nothing; reads the prompts. A prompt that stands there again is counted in `left_out`."""
        for row in rows(self.path):
            if isinstance(row, RowRefused):
                if row.broken:
                    raise FormatRefused(f"{self.path} line {row.line}: {row.reason}")
                left_out["refused_row"] += 1
                continue
            try:
                prompt = prompt_of(row.value)
            except RowError:
                left_out["refused_row"] += 1
                continue
            prompt_hash = selectors.prompt_hash(self.agent, prompt.messages)
            if prompt_hash in self._prompts:
                left_out["repeated_prompt"] += 1
            else:
                self._prompts[prompt_hash] = prompt
        yield from ()


def prompt_of(row: Any) -> Prompt:
    """A row as a prompt: its messages without a final answer, its state, its tools, and every other column as a fact.

    Raises RowError for a row without a prompt.
    """
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object, found {row!r:.80}")
    name = next((name for name in PROMPTS if row.get(name)), None)
    if name is None:
        raise RowError(f"expected one of {', '.join(PROMPTS)}, found {', '.join(map(str, row))[:80]}")
    messages = messages_of(row[name], name)
    while len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if name != "messages" and name != "prompt" and isinstance(row.get("input"), str) and row["input"].strip():
        messages[-1]["content"] += f"\n{row['input']}"
    held = row.get("facts")
    facts = {
        key: value
        for key, value in row.items()
        if key not in (name, *NON_FACT_COLUMNS) and value not in (None, "", [], {})
    } | (dict(held) if isinstance(held, Mapping) else {})
    check_json(facts, "facts")
    return Prompt(messages, row.get("state"), row.get("tools") or None, facts)
