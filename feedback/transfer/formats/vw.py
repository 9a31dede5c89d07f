"""Vowpal Wabbit: choices among listed actions, with their probabilities and costs (the negative reward).

dsjson of contextual bandits (cb), of several slots filled one after the other (ccb), and VW's plain json of cb.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import fmean

from feedback.storage.responses import value_excerpt
from feedback.storage.validation import PROBABILITY_TOLERANCE
from feedback.transfer.formats.base import key_of, row_format, verdicts_read
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedOutcome,
    Record,
    RowError,
    RowSkipped,
    check_json,
    list_of,
    mapping_of,
    number_of,
    text_of,
    time_of,
    uuid_of,
)
from feedback.transfer.formats.writers import Line, NotSaid, View, iso, shape, share_of

SLATES = "a slates file: its slots are chosen and paid together, which is no choice among listed responses"
CONTINUOUS = "a continuous action (_label_ca): only a choice among listed actions can be read"
NO_ACTION_REASON = "no action was taken: nothing says which one was chosen"

TOLERANCE = 1e-3
"""By how much, relative to the larger, two statements of one probability may differ: logs keep single precision."""


def recognises(row: JsonObject) -> bool:
    context = row.get("c")
    if isinstance(context, Mapping) and ("_multi" in context or "_slots" in context):
        return True
    labelled = any(
        name.lower() in ("_label_cost", "_label_action", "_labelindex", "_label_ca") for name in row
    )
    return labelled and ("_multi" in row or "c" in row or "_label_ca" in row)


def records(row: JsonObject, line: int) -> Iterator[Record]:
    if any(name.lower() == "_label_ca" for name in row):
        raise RowError(CONTINUOUS)
    context = row.get("c")
    if context is not None:  # else the columns are features, of any name
        verdicts_read(
            row, used=[name for name in row if name.lower().startswith(("_label", "_original_label"))]
        )
    if isinstance(context, Mapping) and "_slots" in context:
        yield from _slots(row, line)
        return
    if context is None:
        # VW json: features and label side by side, the label's keys in any case
        features = {key: value for key, value in row.items() if not key.lower().startswith("_label")}
        labels = {LABELS.get(key.lower(), key): value for key, value in row.items() if key not in features}
        row = {**labels, "c": features}
    yield from _choice(row, line)


LABELS = {
    name.lower(): name for name in ("_label_cost", "_label_probability", "_label_Action", "_labelIndex")
}


def _event(row: JsonObject) -> str:
    return text_of(row.get("EventId") or row.get("event_id") or "", "EventId")


def _choice(row: JsonObject, line: int) -> Iterator[Record]:
    """A choice of one of the listed actions."""
    context = mapping_of(check_json(row.get("c"), "c"), "c")
    actions = [_text_or_json(action) for action in list_of(context.get("_multi"), "c._multi")]
    chosen = _action_index(row, len(actions))
    if chosen is None:
        yield RowSkipped(line, key_of(row), NO_ACTION_REASON)
        return
    shared = {key: value for key, value in context.items() if key != "_multi"}
    event = _event(row)
    # VW was told not to learn from it: what it cost says nothing
    cost = None if row.get("_skipLearn") is True else row.get("_label_cost")
    yield ImportedDecision(
        line=line,
        key=key_of(row),
        id=uuid_of(event),
        event=None if event else str(line),
        # a bandit has no words of its own: what it saw and what it could do are the prompt
        messages=[{"role": "user", "content": _text_or_json({**shared, "actions": context["_multi"]})}],
        response=actions[chosen],
        state=shared,
        candidates=list(actions),
        propensity=_probability(row, chosen),
        run_id=event,
        created_at=time_of(row.get("Timestamp"), "Timestamp"),
        outcomes=_reward(cost, "_label_cost"),
    )


def _reward(cost: object, what: str) -> tuple[ImportedOutcome, ...]:
    return () if cost is None else (ImportedOutcome("reward", 0.0 - number_of(cost, what)),)


def _action_index(row: JsonObject, count: int) -> int | None:
    """Index of the action taken: `_labelIndex` counts from 0, `_label_Action` from 1, and `a` lists the choice first,
    counting from 1 in most files and from 0 in some, so that it is only believed where it has no 0."""
    index, number, listed = row.get("_labelIndex"), row.get("_label_Action"), row.get("a")
    listed = list_of(listed, "a") if listed is not None else []
    if index is None and number is None:
        if not listed:
            return None
        if any(_parse_int(one, "a") == 0 for one in listed):
            raise RowError(
                "a: holds a 0, so that it may count from 0 or from 1; expected _label_Action or _labelIndex"
            )
        number = listed[0]
    if number is not None and not 1 <= _parse_int(number, "_label_Action") <= count:
        raise RowError(f"_label_Action: expected 1 to {count}, found {value_excerpt(number)}")
    if index is None:
        assert number is not None
        return int(number) - 1
    if number is not None and _parse_int(index, "_labelIndex") != number - 1:
        raise RowError(
            f"_labelIndex: expected {number - 1} beside _label_Action {number}, found {value_excerpt(index)}"
        )
    if not 0 <= _parse_int(index, "_labelIndex") < count:
        raise RowError(f"_labelIndex: expected 0 to {count - 1}, found {value_excerpt(index)}")
    return int(index)


def _parse_int(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RowError(f"{what}: expected a whole number, found {value_excerpt(value)}")
    return value


def _probability(row: JsonObject, chosen: int) -> float | None:
    """The probability the choice was made with, in `_label_probability` or in `p`, which follows the order of `a`.

    Raises RowError where the two say different things: every estimate would be wrong by their ratio.
    """
    label_value = row.get("_label_probability")
    label_probability = None if label_value is None else number_of(label_value, "_label_probability")
    actions, shares = row.get("a"), row.get("p")
    if (
        not isinstance(actions, list)
        or not isinstance(shares, list)
        or len(actions) != len(shares)
        or not actions
    ):
        return label_probability
    total = math.fsum(number_of(share, "p") for share in shares)
    if abs(total - 1) > PROBABILITY_TOLERANCE:
        raise RowError(f"p: expected probabilities that sum to 1, found a sum of {total:.4g}")
    base = 0 if 0 in actions else 1
    if chosen + base not in actions:
        return label_probability
    share = number_of(shares[actions.index(chosen + base)], "p")
    if label_probability is None:
        return share
    if abs(share - label_probability) > TOLERANCE * max(abs(share), abs(label_probability)):
        raise RowError(
            f"_label_probability: {label_probability:g}, but p says {share:g} for the same action; which one is right?"
        )
    return label_probability


# --- Several choices one after the other (ccb) --------------------------------------------------------------


def _slots(row: JsonObject, line: int) -> Iterator[Record]:
    """A decision for each slot, among the actions that earlier slots left over."""
    context = mapping_of(check_json(row.get("c"), "c"), "c")
    actions = list_of(context.get("_multi"), "c._multi")
    if any(isinstance(action, Mapping) and "_slot_id" in action for action in actions):
        raise RowError(SLATES)
    slots = list_of(context.get("_slots"), "c._slots")
    if row.get("_outcomes") is None:
        yield RowSkipped(line, key_of(row), NO_ACTION_REASON)
        return
    outcomes = list_of(row["_outcomes"], "_outcomes")
    if len(outcomes) != len(slots):
        raise RowError(f"_outcomes: expected {len(slots)}, one for each slot, found {len(outcomes)}")
    event = _event(row)
    shared = {key: value for key, value in context.items() if key not in ("_multi", "_slots")}
    left = list(range(len(actions)))
    for number, (slot, outcome) in enumerate(zip(slots, outcomes, strict=True)):
        path = f"_outcomes[{number}]"
        slot, outcome = mapping_of(slot, f"c._slots[{number}]"), mapping_of(outcome, path)
        allowed = (
            left if slot.get("_inc") is None else [n for n in left if n in list_of(slot["_inc"], "_inc")]
        )
        chosen = _parse_int(_first(outcome.get("_a"), f"{path}._a"), f"{path}._a")
        if chosen not in allowed:
            raise RowError(
                f"{path}._a: expected one of {', '.join(map(str, allowed)) or 'none'}, found {chosen}"
            )
        left = [action for action in left if action != chosen]
        share = _first(outcome.get("_p"), f"{path}._p")
        listed = [actions[index] for index in allowed]
        features = {key: value for key, value in slot.items() if key not in ("_id", "_inc")}
        state = {**shared, **({"slot": features} if features else {})}
        yield ImportedDecision(
            line=line,
            key=key_of(row),
            event=None if event else f"{line}:{number}",
            messages=[{"role": "user", "content": _text_or_json({**state, "actions": listed})}],
            response=_text_or_json(actions[chosen]),
            state=state,
            candidates=[_text_or_json(action) for action in listed],
            propensity=None if share is None else number_of(share, f"{path}._p"),
            run_id=f"{event}:{number}" if event else "",
            created_at=time_of(row.get("Timestamp"), "Timestamp"),
            outcomes=()
            if row.get("_skipLearn") is True
            else _reward(outcome.get("_label_cost"), f"{path}._label_cost"),
        )


def _first(value: object, what: str) -> object:
    """The first of a list, or the value itself where it stands alone. Raises RowError for an empty list."""
    if not isinstance(value, list):
        return value
    if not value:
        raise RowError(f"{what}: is empty")
    return value[0]


def _text_or_json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- Writing -----------------------------------------------------------------------------------------------


def _line(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """An event for each choice among listed responses. The reward is an outcome of that name, else what raters say."""
    actions = [item if isinstance(item, str) else item["response"] for item in record.candidates or ()]
    if record.response not in actions:
        raise NotSaid("no_candidates")
    chosen = actions.index(record.response) + 1
    rewards = [outcome.value for outcome in record.outcomes if outcome.name == "reward"]
    shares = [share for share in map(share_of, record.ratings) if share is not None]
    reward = rewards[-1] if rewards else fmean(shares) if shares else None
    alternatives = [number for number in range(1, len(actions) + 1) if number != chosen]
    probability = record.propensity
    rest = None if probability is None or not alternatives else (1 - probability) / len(alternatives)
    shared = record.state if isinstance(record.state, Mapping) else {"state": record.state}
    yield {
        **({} if reward is None else {"_label_cost": 0.0 - reward}),
        **({} if probability is None else {"_label_probability": probability}),
        "_label_Action": chosen,
        "_labelIndex": chosen - 1,
        "Timestamp": iso(record.created_at),
        "Version": "1",
        "EventId": str(record.id),
        "a": [chosen, *alternatives],
        # what the others would have been chosen with nobody recorded: the rest is shared out evenly
        "p": [] if probability is None else [probability, *([rest] * len(alternatives))],
        "c": {**shared, "_multi": [_action(action) for action in actions]},
    }


def _action(text: str) -> object:
    """An action as the features it is made of, where its text is the JSON of an object and reads the same again."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, Mapping) and _text_or_json(value) == text else text


SHAPES = (shape("vw", "choices among listed responses", View.DECISIONS, _line),)

VW = row_format("vw", "Vowpal Wabbit: cb and ccb, dsjson and json", recognises, records, SHAPES)
