"""Rewards of an answer: it is right, it is valid for the agent, its code or JSON parses; rewards of a dataset's rows.

A row holds `prompt` (chat messages) and, if known, `state` and `facts`: what a verifiable reward needs (`tests`,
`answer`, ...). To judge answers:

    rewards = rows_rewarded(rewards_named(["answer"]), rows, answers, agent="tutor")
    [reward.passed for reward in rewards]       # True, False, or None if no function applies

A reward function may have two more methods: `inapplicable(sample)`, why no sampled answer to its prompt can be judged,
and `constant(sample)`, why every valid answer earns the same; both return "" otherwise. They detect rewards that cannot
teach before a model is loaded. Functions without them are tried on sampled answers (`rl.training.rewarding`).
"""

from __future__ import annotations

import ast
import json
import math
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from rl.agents.base import Agent, InvalidResponse, Row
from rl.rewards import code_execution
from rl.rewards.base import (
    RAW_HIGH,
    RAW_LOW,
    Component,
    RewardEngine,
    RewardFunction,
    RewardPart,
    RewardSample,
    RewardValue,
    reward_normalise,
)
from rl.rewards.code_execution import code_of

COLUMNS = ("answer", "answers", "final_answer", "solution_answer", "target")
"""Facts that hold the right answer; the first one found counts. A list holds several right ones."""

MARKS = re.compile(
    r"(?:####|(?:final |the )?answer(?: is)?\s*[:=]|final answer is|answer is)\s*(.+)", re.IGNORECASE
)
"""Marks before the answer: GSM8K's ####, `Answer:`, `the answer is`."""

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?(?:[eE][-+]?\d+)?%?")
ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)
TOLERANCE = 1e-6
"""Relative difference up to which numbers are equal."""


@dataclass(frozen=True)
class AnswerMatchReward:
    """2 for the right answer, -2 for another; does not apply if no right answer is known.

    The response's answer is its last \\boxed{...}, else the text after its last mark (`####`, `Answer:`, `the answer
    is`), else the whole response; if the right answer is a number and nothing is marked, the last number. Numbers are
    compared as numbers (1,000 is 1000.0, 1/2 is 0.5, 50% is 0.5), objects and lists as JSON, texts without case,
    punctuation, articles and extra spaces (Rajpurkar et al. 2016, SQuAD). Of several answers the last one counts.
    """

    name: str = "answer"

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        """One value per sample, in order; `detail` holds the answer read and the one expected."""
        return [self._value(sample) for sample in samples]

    def inapplicable(self, sample: RewardSample) -> str:
        """Why no response to this prompt can be judged; empty if it can."""
        return (
            ""
            if _reference_answers(sample)
            else f"the prompt has no right answer (facts: {', '.join(COLUMNS)})"
        )

    def _value(self, sample: RewardSample) -> RewardValue:
        if why := self.inapplicable(sample):
            return RewardValue(None, {"why": why})
        expected = _reference_answers(sample)
        right = any(same_answer(sample.response, one) for one in expected)
        detail = {"read": answer_of(sample.response, expected[0])[:200], "expected": str(expected[0])[:200]}
        return RewardValue(RAW_HIGH if right else RAW_LOW, detail)


def _reference_answers(sample: RewardSample) -> list[object]:
    """The right answers; empty if unknown."""
    value = next((sample.facts[name] for name in COLUMNS if sample.facts.get(name) not in (None, "")), None)
    if value is None:
        return []
    return (
        value
        if isinstance(value, list) and all(isinstance(one, (str, int, float)) for one in value)
        else [value]
    )


def answer_of(response: str, expected: object = "") -> str:
    """The answer in a response, as text; `expected` only decides whether to look for a number."""
    text = response.strip()
    if boxed := _box_content(text):
        return boxed
    if marked := MARKS.findall(text):
        return str(marked[-1]).strip()
    if number_of(_final(expected)) is not None and number_of(text) is None:
        numbers = [
            found.group() for found in NUMBER.finditer(text) if any(c.isdigit() for c in found.group())
        ]
        return numbers[-1] if numbers else text
    return text


def same_answer(response: str, expected: object) -> bool:
    """True if a response gives this answer."""
    if isinstance(expected, (dict, list)):
        try:
            found = json.loads(answer_of(response))
        except (ValueError, RecursionError):
            return False
        return type(found) is type(expected) and bool(found == expected)
    right = _final(expected)
    given = answer_of(response, expected)
    wanted, number = number_of(right), number_of(given)
    if wanted is not None:
        return number is not None and math.isclose(number, wanted, rel_tol=TOLERANCE, abs_tol=1e-9)
    return normal_answer(given) == normal_answer(right) != ""


def _final(expected: object) -> str:
    """The right answer itself, if the column also holds its derivation (GSM8K: reasoning, ####, answer)."""
    if isinstance(expected, bool):
        return "true" if expected else "false"
    text = str(expected).strip()
    return text.rpartition("####")[2].strip() if "####" in text else _box_content(text) or text


def _box_content(text: str) -> str:
    """Content of the last \\boxed{...} with balanced braces; empty without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return ""
    depth = 0
    for at in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 7 : at].strip()
    return ""


def number_of(text: str) -> float | None:
    """The value of a text that is one number, with currency signs, thousands' commas, a fraction or a percent sign."""
    bare = text.strip().rstrip(".").strip("$€£ ").replace("−", "-")
    if not bare or not NUMBER.fullmatch(bare) or not any(c.isdigit() for c in bare):
        return None
    share = bare.endswith("%")
    try:
        value = float(Fraction(bare.rstrip("%").replace(",", "")))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value / 100 if share else value


def normal_answer(text: str) -> str:
    """A text without case, outer punctuation of words, articles and extra spaces."""
    text = unicodedata.normalize("NFKC", text).casefold()
    words = (word.strip(string.punctuation + "“”‘’«»") for word in ARTICLES.sub(" ", text).split())
    return " ".join(word for word in words if word)


# --- Rewards for form: code and JSON that parse, and answers that are valid for the agent ---

RIGHT_FROM = -1.0
"""Raw reward of a valid answer that is known to be entirely wrong."""

LONGEST = 100_000
"""Longest code in characters that is parsed."""

PARSE_ATTEMPTS = 5
"""Attempts to parse a text, because of a CPython fault (see `parse_python`)."""


@dataclass(frozen=True)
class SyntaxValidationReward:
    """2 if the response parses as `language` (python or json), else -2. Nothing is run."""

    language: str = "python"
    name: str = "syntax"

    def __post_init__(self) -> None:
        if self.language not in ("python", "json"):
            raise ValueError(f"syntax is checked for python and json, found {self.language!r}")

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [self._value(sample.response) for sample in samples]

    def constant(self, sample: RewardSample) -> str:
        """Why every valid answer earns the same."""
        return f"each that parses as {self.language} earns 2"

    def _value(self, response: str) -> RewardValue:
        if len(response) > LONGEST:
            return RewardValue(
                RAW_LOW, {"fault": f"{len(response):,} characters, at most {LONGEST:,} are parsed"}
            )
        try:
            if self.language == "json":
                json.loads(response)
            else:
                found = code_of(response)
                if found is None or found[0] != "python":
                    return RewardValue(RAW_LOW, {"fault": "no Python in the response"})
                parse_python(found[1])
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return RewardValue(RAW_LOW, {"fault": f"{type(error).__name__}: {error}"[:300]})
        return RewardValue(RAW_HIGH)


def parse_python(text: str) -> ast.Module:
    """Syntax tree of Python source. Raises what `ast.parse` raises.

    CPython 3.11 counts the depth of a tree once for all threads (gh-106905). Two concurrent parses may therefore fail
    without a fault in the text, so it tries again.
    """
    for _ in range(PARSE_ATTEMPTS):
        try:
            return ast.parse(text)
        except SystemError as error:
            fault = error
    raise ValueError(f"cannot be parsed: {fault}")


@dataclass(frozen=True)
class FormatComplianceReward:
    """2 if the response is valid for the agent, else -2; free text must only not be empty."""

    name: str = "format"

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [_acted_on(sample.definition, sample, RAW_HIGH) for sample in samples]

    def constant(self, sample: RewardSample) -> str:
        return "each that the agent can act on earns 2"


@dataclass(frozen=True)
class AgentReward:
    """The agent's own judgement: -2 for an invalid answer, -1 (wrong) to 2 (right) for a known one, 1 if unknown."""

    name: str = "agent"

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [self._value(sample) for sample in samples]

    def constant(self, sample: RewardSample) -> str:
        """Why every valid answer to a prompt earns the same: the right one is unknown. Empty if it is known."""
        agent, state = sample.definition, sample.facts.get("state")
        if not isinstance(state, dict):
            return "each earns 1, as the prompts have no state that could say which is right"
        if type(agent).quality is not Agent.quality or agent.ground_truth(state) is not None:
            return ""
        return f"each earns 1, as agent {sample.agent} does not know which is right"

    def _value(self, sample: RewardSample) -> RewardValue:
        agent = sample.definition
        value = _acted_on(agent, sample, 1.0)
        state = sample.facts.get("state")
        if value.raw != 1.0 or not isinstance(state, dict):
            return value
        quality = agent.quality(state, sample.response)
        if quality is None:
            return value
        return RewardValue(RIGHT_FROM + (RAW_HIGH - RIGHT_FROM) * quality, {"right": quality})


def _acted_on(agent: Agent, sample: RewardSample, good: float) -> RewardValue:
    if not sample.response.strip():
        return RewardValue(RAW_LOW, {"fault": "an empty response"})
    try:
        agent.parse(sample.response, sample.facts.get("state"))
    except InvalidResponse as error:
        return RewardValue(RAW_LOW, {"fault": str(error)[:300]})
    return RewardValue(good)


# --- The floor of invalid answers ---


def invalid_reason(sample: RewardSample) -> str:
    """Why a response is invalid for an agent with discrete answers; empty if it is valid, and for free text."""
    agent = sample.definition
    if not agent.discrete:
        return ""
    try:
        agent.parse(sample.response, sample.facts.get("state"))
    except InvalidResponse as error:
        return str(error)[:300]
    return ""


def reward_with_validity(raw: float, sample: RewardSample) -> float:
    """The raw reward, but -2 for a response that is invalid for its agent.

    Reward models were trained on valid answers. Without this floor a policy may earn more by breaking the format than
    by answering well.
    """
    return RAW_LOW if invalid_reason(sample) else raw


# --- Rewards of answers to a dataset's rows, shared by training and evaluation. Pure ---

FACTS = "facts"
"""Key of facts in a row and in a decision's metadata."""

ROW_COLUMNS = (*code_execution.COLUMNS, *COLUMNS)
"""Facts that may also be outside `facts` in a decision's metadata, as imports keep them."""


@dataclass(frozen=True)
class RowReward:
    """Reward of an answer to a row."""

    raw: float | None
    """In [-2, 2]: the mean of the functions that apply, -2 for an invalid answer; None if none applies."""
    parts: Mapping[str, RewardPart] = field(default_factory=dict)
    """Function -> {"raw", "weight", "detail"}."""

    @property
    def value(self) -> float | None:
        """In [0, 1]."""
        return None if self.raw is None else reward_normalise(self.raw)

    @property
    def passed(self) -> bool | None:
        """True if it earned the maximum (all tests, the right answer); None if no function applies."""
        return None if self.raw is None else self.raw >= RAW_HIGH - 1e-9


def row_sample(row: Row, response: str, agent: str, **more: object) -> RewardSample:
    """An answer to a row for reward functions; `more`: facts of the answer (tokens, ended)."""
    facts = {**(row.get(FACTS) or {}), "state": row.get("state"), **more}
    return RewardSample(prompt=row["prompt"], response=response, agent=agent, facts=facts)


def rows_rewarded(
    functions: Sequence[RewardFunction],
    rows: Sequence[Row],
    answers: Sequence[str],
    *,
    agent: str,
) -> list[RowReward]:
    """Reward of each answer to its row, in order. Runs no model, and no code outside the sandbox."""
    engine = RewardEngine([Component(function) for function in functions])
    samples = [row_sample(row, answer, agent) for row, answer in zip(rows, answers, strict=True)]
    return [
        RowReward(
            None if rewarded.raw is None else reward_with_validity(rewarded.raw, sample), rewarded.components
        )
        for rewarded, sample in zip(engine.reward(samples), samples, strict=True)
    ]


def facts_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The facts in a decision's metadata: those under `facts`, and columns of tests and answers beside it."""
    found = {name: metadata[name] for name in ROW_COLUMNS if metadata.get(name) not in (None, "")}
    held = metadata.get(FACTS)
    return {**found, **held} if isinstance(held, Mapping) else found


# --- Rewards that cannot teach ---

INSIST = "--set allow_constant_reward=true trains anyway"
"""Hint to override the check."""


def inapplicable_reason(function: RewardFunction, row: Row, agent: str) -> str:
    """Why a function cannot judge a sampled answer to a row; empty if it may."""
    check = getattr(function, "inapplicable", None)
    return str(check(row_sample(row, "", agent))) if callable(check) else ""


def constant_reason(function: RewardFunction, row: Row, agent: str) -> str:
    """Why a function gives every valid answer to a row the same; empty if it may differ."""
    check = getattr(function, "constant", None)
    return str(check(row_sample(row, "", agent))) if callable(check) else ""


def teaching_fault(functions: Sequence[RewardFunction], rows: Sequence[Row], agent: str) -> tuple[str, bool]:
    """(why none of the functions can teach on these rows, whether an operator may override); ("", False) if one can.

    A function can teach if on at least one row it applies and may tell valid answers apart.
    """
    never: list[str] = []
    constants: list[str] = []
    for function in functions:
        applies = [row for row in rows if not (why := inapplicable_reason(function, row, agent))]
        if not applies:
            never.append(f"{function.name} applies to none of {len(rows)} prompts: {why}")
            continue
        reasons = [constant_reason(function, row, agent) for row in applies]
        if not all(reasons):
            return "", False
        constants.append(f"{function.name} is constant over valid answers: {reasons[0]}")
    text = "; ".join([*constants, *never])
    if not constants:
        return (
            (
                f"no reward applies to sampled answers: {text}. Give prompts that it applies to, or another "
                "--reward"
            ),
            False,
        )
    return (
        f"{text}. Such a reward teaches the answer format only: give one that tells right from wrong "
        "(answer, code_execution, learned, model:RUN, your own function), or prompts whose right answer is "
        f"known; {INSIST}"
    ), True
