"""Golden cases: decisions that must be right, written by hand or taken from one that was made."""

from __future__ import annotations

import json

from feedback.selectors import decision_get, ratings_standing
from rl.datasets.feedback_types import NEUTRAL, rating_value

SEPARATOR = "---"
"""A line of it stands between two responses where several are written into one field."""


def golden_of(decision_id: str) -> dict[str, object]:
    """Draft of a golden case: the decision's prompt and state, and by its ratings, its response or their
    corrections as accepted, or the response as forbidden. {} for no decision."""
    decision = decision_get(decision_id)
    if decision is None:
        return {}
    ratings = list(ratings_standing(decision.agent).filter(decision=decision))
    values = [rating_value(row.thumb, row.stars, row.score) for row in ratings]
    verdicts = [value for value in values if value is not None]
    accepted = list(dict.fromkeys(row.correction for row in ratings if row.correction))
    forbidden: list[str] = []
    if verdicts:
        liked = sum(verdicts) / len(verdicts) > NEUTRAL
        (accepted if liked else forbidden).append(decision.response)
    questions = [turn.get("content") for turn in decision.messages if turn.get("role") == "user"]
    return {
        "agent": decision.agent,
        "name": " ".join(str(questions[-1] if questions else "").split())[:80],
        "messages": decision.messages,
        "state": decision.state,
        "accepted": accepted,
        "forbidden": [text for text in forbidden if text not in accepted],
    }


def prompt_written(messages: object) -> str:
    """Messages as they are edited: one question in plain words, anything longer as JSON."""
    if isinstance(messages, list) and len(messages) == 1 and set(messages[0]) == {"role", "content"}:
        content = messages[0]["content"]
        if messages[0]["role"] == "user" and isinstance(content, str) and content.strip()[:1] != "[":
            return content
    return json.dumps(messages, ensure_ascii=False, indent=2)


def prompt_read(text: str) -> object:
    """The reverse: plain words are one question. Raises ValueError for a list that is no JSON."""
    if text.strip()[:1] != "[":
        return [{"role": "user", "content": text.strip()}]
    return json.loads(text)


def responses_written(responses: list[str]) -> str:
    return f"\n{SEPARATOR}\n".join(responses)


def responses_read(text: str) -> list[str]:
    """The responses between lines of dashes; empty ones are none."""
    found: list[str] = []
    lines: list[str] = []
    for line in [*text.replace("\r\n", "\n").split("\n"), SEPARATOR]:
        if line.strip() == SEPARATOR:
            found.append("\n".join(lines).strip("\n"))
            lines = []
        else:
            lines.append(line)
    return [response for response in found if response.strip()]
