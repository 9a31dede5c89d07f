"""Published data sets with columns of their own, read only: votes of people and of models, scores, rankings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from statistics import fmean
from typing import Any

from feedback.messages import Completion, Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.arenas import split_turns
from feedback.transfer.formats.base import (
    NO_RATING,
    TaughtPrompt,
    each_item,
    holds,
    key_of,
    row_format,
    text_only,
)
from feedback.transfer.formats.calls import chat_of, text_or_empty
from feedback.transfer.formats.cells import Cell, JsonObject, number_in
from feedback.transfer.formats.declared import Pair, at, metadata_at, notes_of, sides_of
from feedback.transfer.formats.pair_files import LAST, turns_of_text
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    Record,
    RowError,
    RowLeftOut,
    RowSkipped,
    compared,
    completion_of,
    list_of,
    messages_of,
    number_of,
    objects_of,
    text_of,
)
from feedback.transfer.formats.training_files import preference_parts

# --- Stanford Human Preferences: two comments on one post, of which one got more votes though it came later -------

BETTER = {"1": "left", "1.0": "left", "true": "left", "0": "right", "0.0": "right", "false": "right"}
"""`labels`: 1 says that A is the better one, 0 that B is."""

# people wrote both: there is no policy, and no single rater either
_posts = Pair(
    "history",
    ("human_ref_A", "human_ref_B"),
    metadata={"post_id": "post_id", "domain": "domain"},
    required=True,
)


def _shp(row: JsonObject, line: int) -> Iterator[Record]:
    better = BETTER.get(str(row.get("labels")).lower())
    if better is None:
        raise RowError(
            f"labels: expected 1 (A is better) or 0 (B is), found {value_excerpt(row.get('labels'))}"
        )
    yield compared(*_posts(row, line), better, ordered=False)


SHP = row_format(
    "shp",
    "Stanford Human Preferences",
    holds("history human_ref_A human_ref_B labels"),
    _shp,
    verdicts=("labels", "score_A", "score_B", "score_ratio", "upvote_ratio"),
)

# --- AlpacaEval: outputs of one model, and an annotator model's preferences between two ---------------------------

_outputs = Pair(
    "instruction", ("output_1", "output_2"), ("generator_1", "generator_2"), metadata={"dataset": "dataset"}
)


def _alpacaeval(row: JsonObject, line: int) -> Iterator[Record]:
    if "output_1" not in row:
        messages = messages_of(text_of(row.get("instruction"), "instruction"), "instruction")
        output = text_of(row.get("output"), "output")
        if not output.strip():
            raise RowLeftOut("no response")
        taught = TaughtPrompt(line, key_of(row), messages, metadata_at(row, _outputs.metadata))
        yield taught.demonstration(output, text_or_empty(row.get("generator")))
        return
    if row.get("preference") is None:
        raise RowLeftOut("the annotator's words could not be read")
    # 1 prefers the first output, 2 the second; weighted annotators give fractions, and older files 0 for a draw
    number = number_of(row["preference"], "preference")
    if number != 0 and not 1 <= number <= 2:
        raise RowError(
            f"preference: expected 1 to 2, or 0 for a draw, found {value_excerpt(row['preference'])}"
        )
    preference = "tie" if number in (0, 1.5) else "left" if number < 1.5 else "right"
    rater = text_or_empty(row.get("annotator"))
    yield compared(*_outputs(row, line), preference, simulated=True, rater=rater)


ALPACAEVAL = row_format(
    "alpacaeval",
    "AlpacaEval outputs and annotations",
    holds("instruction output_1 output_2 preference generator_1", "instruction output generator"),
    _alpacaeval,
    verdicts=("annotator", "preference"),
)

# --- HelpSteer 1 to 3: ratings of five attributes (0 to 4), and preferences from -3 to 3 --------------------------

ATTRIBUTES = ("correctness", "coherence", "complexity", "verbosity")
"""Attributes beside helpfulness, which is the score: stored as outcomes, because more of them is not always
better."""

TURN = re.compile(r"\n<extra_id_1>(User|Assistant)\n")
NEITHER = -100
"""Strength of a preference that says that neither response is valid."""


def _helpsteer(row: JsonObject, line: int) -> Iterator[Record]:
    """Raters have no names, and their order in a list names nobody across rows."""
    if "helpfulness" in row:
        yield _helpsteer_rated(row, line)
    elif "overall_preference" in row:
        messages = messages_of(row.get("context"), "context")
        votes = [
            (vote.get("score"), vote.get("reasoning")) for vote in _objects(row, "individual_preference")
        ] or [(row["overall_preference"], "")]
        yield from _helpsteer_votes(row, line, Pair("", ("response1", "response2")), messages, votes)
    else:
        # the three most similar votes are among all of them: reading both would count votes twice
        votes = [
            (vote.get("strength"), vote.get("justification"))
            for vote in _objects(row, "all_preferences_unprocessed")
        ] or [(row.get("preference_strength"), row.get("preference_statement"))]
        messages = _marked_turns(row.get("prompt"), "prompt")
        yield from _helpsteer_votes(row, line, Pair("", ("response_1", "response_2")), messages, votes)


def _objects(row: JsonObject, name: str) -> list[JsonObject]:
    value = row.get(name)
    return objects_of(value if value is not None else [], name)


def _marked_turns(value: object, what: str) -> list[Message]:
    """A prompt of one text, whose later turns begin with a line `<extra_id_1>User` or `<extra_id_1>Assistant`."""
    first, *rest = TURN.split(text_of(value, what, required=True))
    later = zip(rest[::2], rest[1::2], strict=True)
    turns = [{"role": speaker.lower(), "content": text} for speaker, text in later]
    return [{"role": "user", "content": first}, *turns]


def _helpsteer_rated(row: JsonObject, line: int) -> ImportedDecision:
    helpful = row["helpfulness"]
    if helpful is None:
        raise RowLeftOut(NO_RATING)
    scores = _numbers(helpful, "helpfulness")
    if not scores or not all(0 <= score <= 4 for score in scores):
        raise RowError(f"helpfulness: expected 0 to 4, found {value_excerpt(helpful)}")
    measured = ((name, _numbers(row.get(name), name)) for name in ATTRIBUTES)
    return ImportedDecision(
        line=line,
        key=key_of(row),
        messages=_marked_turns(row.get("prompt"), "prompt"),
        response=text_of(row.get("response"), "response", required=True),
        ratings=tuple(ImportedRating(score=score / 4, tags=("helpfulness",)) for score in scores),
        outcomes=tuple(ImportedOutcome(name, fmean(values)) for name, values in measured if values),
    )


def _numbers(value: object, what: str) -> list[float]:
    items = value if isinstance(value, list) else [] if value is None else [value]
    return [number_of(item, what) for item in items]


def _helpsteer_votes(
    row: JsonObject, line: int, pair: Pair, messages: list[Message], votes: list[tuple[object, object]]
) -> Iterator[Record]:
    """A comparison for each vote; below 0 the first response is better."""
    sides = pair(row, line, messages)
    for strength, reason in votes:
        if strength is None:
            yield RowSkipped(line, key_of(row), "a vote without a strength")
            continue
        number = number_of(strength, "strength")
        if number != NEITHER and not -3 <= number <= 3:
            found = value_excerpt(strength)
            raise RowError(f"strength: expected -3 to 3, or {NEITHER} for neither, found {found}")
        preference = "left" if number < 0 else "right" if number > 0 else "tie"
        tags = (f"strength {abs(number):g}",) if number not in (0, NEITHER) else ()
        notes = notes_of(reason, "reason")
        yield compared(*sides, "both_bad" if number == NEITHER else preference, tags=tags, notes=notes)


HELPSTEER = row_format(
    "helpsteer",
    "HelpSteer 1 and 2 ratings, HelpSteer 2 and 3 preferences",
    holds(
        "prompt response helpfulness verbosity",
        "response_1 response_2 preference_strength",
        "response1 response2 overall_preference",
    ),
    _helpsteer,
    verdicts=(
        "overall_preference",
        "individual_preference",
        "preference_strength",
        "preference_statement",
        "preference_elaboration",
    ),
)

# --- Pairs with a score for each side, given by a model: ultrafeedback_binarized (1 to 10), Capybara (1 to 5) ------

SCALES = {"score": (1.0, 10.0), "rating": (1.0, 5.0)}
"""Beginning of the two columns -> lowest and highest value, as the data sets' cards state them."""


def _scored_sides(
    row: JsonObject, line: int, parts: tuple[list[Message], Completion, Completion], **facts: Any
) -> Iterator[Record]:
    """Both decisions, and their comparison. The same score is a tie: the file sells it as a preference."""
    messages, chosen, rejected = parts
    if chosen == rejected:
        raise RowLeftOut("chosen and rejected are the same: no preference")
    ratings = [_side_rating(row, side) for side in ("chosen", "rejected")]
    left, right = (
        ImportedDecision(
            line=line,
            key=str(row.get("prompt_id") or "")[:200] or key_of(row),
            messages=messages,
            response=response,
            policy=text_or_empty(row.get(f"{side}_model")),
            ratings=() if rating is None else (rating,),
            **facts,
        )
        for side, response, rating in zip(("chosen", "rejected"), (chosen, rejected), ratings, strict=True)
    )
    # of the decisions in a comparison the words alone are read: their ratings come with records of their own
    yield from (left, right)
    tie = ratings[0] is not None and ratings[0] == ratings[1]
    yield compared(left, right, "tie" if tie else "left", ordered=False, simulated=True)


def _side_rating(row: JsonObject, side: str) -> ImportedRating | None:
    for scale, (low, high) in SCALES.items():
        name = f"{scale}_{side}"
        value = row.get(name)
        value = number_in(value) if isinstance(value, Cell) else value
        if value is None:
            continue
        number = number_of(value, name)
        if not low <= number <= high:
            raise RowError(
                f"{name}: expected {low:g} to {high:g}, found {value_excerpt(value)}; of another scale, "
                f"leave the two out with --map ignore={scale}_chosen+{scale}_rejected"
            )
        if scale == "rating" and number == int(number):
            return ImportedRating(stars=int(number), rater_kind="simulated")
        return ImportedRating(score=(number - low) / (high - low), rater_kind="simulated")
    return None


def _scored_pair(row: JsonObject, line: int) -> Iterator[Record]:
    text_only(row)
    conversations = isinstance(row.get("chosen"), list) and isinstance(row.get("rejected"), list)
    if conversations and row["chosen"] == row["rejected"]:
        raise RowLeftOut("chosen and rejected are the same: no preference")
    # beside whole conversations the prompt is a text made with some model's template, or repeats their first turn
    return _scored_sides(row, line, preference_parts({**row, "prompt": None} if conversations else row))


SCORED_PAIRS = row_format(
    "scored_pairs",
    "Pairs with a score for each side: ultrafeedback_binarized, Capybara",
    holds("chosen rejected score_chosen", "chosen rejected rating_chosen"),
    _scored_pair,
    verdicts=("chosen", "rejected", "score_chosen", "score_rejected"),
)


def _is_capybara(row: JsonObject) -> bool:
    if {"chosen", "rejected", "rating_chosen", "rating_rejected"} <= row.keys():
        return isinstance(row["chosen"], list)
    # of TRL's own rows the completion begins with the response
    first = at(row, "completion[0].role")
    return {"prompt", "label", "rating", "model"} <= row.keys() and first in ("user", "system")


def _capybara(row: JsonObject, line: int) -> Iterator[Record]:
    """Pairs, and labelled answers whose completion repeats the prompt. What both conversations begin with is the
    prompt; the templated `prompt` of a pair is not read."""
    metadata = metadata_at(row, {"source": "source"})
    if "chosen" in row:
        chosen, rejected = (chat_of(row.get(side), side) for side in ("chosen", "rejected"))
        prompt, responses = split_turns(chosen, rejected)
        yield from _scored_sides(row, line, (prompt, *responses), metadata=metadata)
        return
    turns = chat_of(row.get("completion"), "completion")
    last = next((i for i in range(len(turns) - 1, -1, -1) if turns[i]["role"] != "assistant"), -1)
    if last < 0 or last + 1 == len(turns):
        raise RowError("completion: expected the prompt and an answer to it")
    label, stars = row.get("label"), row.get("rating")
    if label not in (0, 1, True, False):
        raise RowError(f"label: expected true or false, found {value_excerpt(label)}")
    if isinstance(stars, bool) or stars not in (None, 1, 2, 3, 4, 5):
        raise RowError(f"rating: expected 1 to 5, found {value_excerpt(stars)}")
    thumb, stars = "up" if label else "down", None if stars is None else int(stars)
    yield ImportedDecision(
        line=line,
        key=key_of(row),
        messages=turns[: last + 1],
        response=completion_of(turns[last + 1 :], "completion", required=True),
        policy=text_or_empty(row.get("model")),
        metadata=metadata,
        ratings=(ImportedRating(thumb=thumb, stars=stars, rater_kind="simulated"),),
    )


CAPYBARA = row_format(
    "capybara",
    "Capybara pairs and labels with ratings",
    _is_capybara,
    _capybara,
    verdicts=("label", "rating", "rating_chosen", "rating_rejected"),
)

# --- UltraFeedback: completions of several models to one instruction, each rated by a model -----------------------

ASPECTS = ("instruction_following", "honesty", "truthfulness", "helpfulness")


def _is_ultrafeedback(row: JsonObject) -> bool:
    completions = row.get("completions")
    if not isinstance(row.get("instruction"), str) or not isinstance(completions, list):
        return False
    return "models" in row or any(isinstance(item, Mapping) and "annotations" in item for item in completions)


def _ultrafeedback(row: JsonObject, line: int) -> Iterator[Record]:
    """The fine-grained score (the mean of four aspects, 1 to 5) is the rating; the overall score (1 to 10) was wrong
    in early files and is kept as an outcome. The system prompt of a completion is part of what its model saw."""
    instruction = text_of(row.get("instruction"), "instruction", required=True)
    completions = list_of(row.get("completions"), "completions")
    if not completions:
        raise RowLeftOut("a prompt without a response is no decision")
    candidates = at(completions, "[?type(response) == 'string'].response")
    answers = {f"{name}_answers": f"{name}_answers[?@ != 'None']" for name in ("correct", "incorrect")}
    metadata = metadata_at(row, {"source": "source", **answers})

    def completion(item: JsonObject, line: int) -> Iterator[Record]:
        system = text_of(item.get("custom_system_prompt") or "", "custom_system_prompt")
        score, overall = (_number(item.get(name)) for name in ("fine-grained_score", "overall_score"))
        rated = {aspect: _number(at(item, f"annotations.{aspect}.Rating")) for aspect in ASPECTS}
        aspects = {aspect: number for aspect, number in rated.items() if number is not None}
        if score is None and aspects:
            score = fmean(aspects.values())  # what the fine-grained score is made of
        if score is not None and not 1 <= score <= 5:
            raise RowError(f"fine-grained_score: expected 1 to 5, found {value_excerpt(score)}")
        critique, share = (
            notes_of(item.get("critique"), "critique"),
            None if score is None else (score - 1) / 4,
        )
        rating = ImportedRating(rater_kind="simulated", score=share, notes=critique)
        measured = {**({} if overall is None else {"overall_score": overall}), **aspects}
        messages = [{"role": "system", "content": system}] if system.strip() else []
        yield ImportedDecision(
            line=line,
            key=key_of(row),
            messages=[*messages, {"role": "user", "content": instruction}],
            response=text_of(item.get("response"), "response", required=True),
            candidates=candidates,
            policy=text_or_empty(item.get("model")),
            metadata=metadata,
            ratings=(rating,) if score is not None or critique.strip() else (),
            outcomes=tuple(ImportedOutcome(name, value) for name, value in measured.items()),
        )

    yield from each_item(line, completions, "completions", completion)


def _number(value: object) -> float | None:
    """A number, or the text of one; None where the rater gave none ("N/A")."""
    try:
        number = (
            float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
        )
    except (ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < 1e9 else None


ULTRAFEEDBACK = row_format(
    "ultrafeedback",
    "UltraFeedback: rated completions of several models",
    _is_ultrafeedback,
    _ultrafeedback,
    verdicts=(),
)

# --- Nectar: up to seven answers to one conversation, put in order by a model --------------------------------------


def _is_nectar(row: JsonObject) -> bool:
    first = at(row, "answers[0]")
    return "prompt" in row and isinstance(first, Mapping) and {"answer", "rank"} <= first.keys()


def _nectar(row: JsonObject, line: int) -> Iterator[Record]:
    """A comparison of each two answers; rank 1 is the best."""
    prompt, found, rest = text_of(row.get("prompt"), "prompt").rpartition(LAST)
    if not found or rest.strip():
        raise RowError("prompt: expected it to end with a blank line and 'Assistant:'")
    messages, metadata = turns_of_text(prompt), metadata_at(row, {"source": "source"})
    ranked: list[tuple[float, Completion, str]] = []
    for index, answer in enumerate(objects_of(row.get("answers"), "answers")):
        rank = number_of(answer.get("rank"), f"answers[{index}].rank")
        text = text_of(answer.get("answer"), f"answers[{index}].answer")
        ranked.append((rank, text, text_or_empty(answer.get("model"))))
    for (rank, left, model), (other_rank, right, other_model) in combinations(ranked, 2):
        if left == right:
            yield RowSkipped(line, key_of(row), "both responses are the same: no preference")
            continue
        sides = sides_of(row, line, messages, (left, right), (model, other_model), metadata=metadata)
        preference = "tie" if rank == other_rank else "left" if rank < other_rank else "right"
        yield compared(*sides, preference, ordered=False, simulated=True)


NECTAR = row_format("nectar", "Nectar: ranked answers", _is_nectar, _nectar, verdicts=("good_natured",))
