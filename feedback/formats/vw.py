"""Vowpal Wabbit dsjson: a choice among listed actions, with its probability and its cost (the negative reward)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from feedback.formats.base import has, key_of, row_format
from feedback.formats.records import (
    ImportedDecision,
    ImportedOutcome,
    Record,
    RowError,
    check_json,
    list_of,
    mapping_of,
    number_of,
    shown,
    text_of,
    time_of,
    uuid_of,
)
from feedback.formats.writing import Line, NotSaid, Shape, View, iso, one_by_one, share_of


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "c", "a", "p") and isinstance(row["c"], Mapping) and "_multi" in row["c"]


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    context = mapping_of(check_json(row.get("c"), "c"), "c")
    actions = [_said(action) for action in list_of(context.get("_multi"), "c._multi")]
    shared = {key: value for key, value in context.items() if key != "_multi"}
    event = text_of(row.get("EventId") or "", "EventId")
    cost, probability = row.get("_label_cost"), row.get("_label_probability")
    yield ImportedDecision(
        line=line,
        key=key_of(row),
        id=uuid_of(event),
        # a bandit has no words of its own: what it saw and what it could do are the prompt
        messages=[{"role": "user", "content": _said({**shared, "actions": context["_multi"]})}],
        response=actions[_chosen(row, len(actions))],
        state=shared,
        candidates=list(actions),
        propensity=None if probability is None else number_of(probability, "_label_probability"),
        run_id=event,
        created_at=time_of(row.get("Timestamp"), "Timestamp"),
        outcomes=() if cost is None else (ImportedOutcome("reward", 0.0 - number_of(cost, "_label_cost")),),
    )


def _chosen(row: Mapping[str, Any], count: int) -> int:
    """Index of the action taken: `_label_Action` counts from 1, `_labelIndex` from 0, `a` lists the choice first."""
    number, index = row.get("_label_Action"), row.get("_labelIndex")
    listed = list_of(row.get("a"), "a")
    if number is None:
        number = listed[0] if listed else None
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= count:
        raise RowError(f"_label_Action: expected 1 to {count}, found {shown(number)}")
    if index is not None and index != number - 1:
        raise RowError(
            f"_labelIndex: expected {number - 1} beside _label_Action {number}, found {shown(index)}"
        )
    return number - 1


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- Writing -----------------------------------------------------------------------------------------------


def _event(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """An event for each choice among listed responses. The reward is an outcome of that name, else what raters say."""
    actions = [item if isinstance(item, str) else item["response"] for item in record.candidates or ()]
    if record.response not in actions:
        raise NotSaid("no_candidates")
    chosen = actions.index(record.response) + 1
    rewards = [outcome.value for outcome in record.outcomes if outcome.name == "reward"]
    shares = [share for share in map(share_of, record.ratings) if share is not None]
    reward = rewards[-1] if rewards else fmean(shares) if shares else None
    others = [number for number in range(1, len(actions) + 1) if number != chosen]
    probability = record.propensity
    rest = None if probability is None or not others else (1 - probability) / len(others)
    shared = record.state if isinstance(record.state, Mapping) else {"state": record.state}
    yield {
        **({} if reward is None else {"_label_cost": 0.0 - reward}),
        **({} if probability is None else {"_label_probability": probability}),
        "_label_Action": chosen,
        "_labelIndex": chosen - 1,
        "Timestamp": iso(record.created_at),
        "Version": "1",
        "EventId": str(record.id),
        "a": [chosen, *others],
        # what the others would have been chosen with nobody recorded: the rest is shared out evenly
        "p": [] if probability is None else [probability, *([rest] * len(others))],
        "c": {**shared, "_multi": [_action(action) for action in actions]},
    }


def _action(text: str) -> Any:
    """An action as the features it is made of, where its text is the JSON of an object and reads the same again."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, Mapping) and _said(value) == text else text


SHAPES = (Shape("vw", "choices among listed responses", (View.DECISIONS,), one_by_one(_event)),)

FORMAT = row_format("vw", "Vowpal Wabbit dsjson", recognises, records, SHAPES)
