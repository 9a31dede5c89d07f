"""Reward for the right answer: the response's answer is compared with the prompt's known answer."""

from __future__ import annotations

import json
import math
import re
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardSample, RewardValue

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


def _reference_answers(sample: RewardSample) -> list[Any]:
    """The right answers; empty if unknown."""
    value = next((sample.facts[name] for name in COLUMNS if sample.facts.get(name) not in (None, "")), None)
    if value is None:
        return []
    return (
        value
        if isinstance(value, list) and all(isinstance(one, (str, int, float)) for one in value)
        else [value]
    )


def answer_of(response: str, expected: Any = "") -> str:
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


def same_answer(response: str, expected: Any) -> bool:
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


def _final(expected: Any) -> str:
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
