"""Roles of columns: which column of a table, or which path into a row of JSON, holds what."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from feedback.transfer.formats.cells import JsonObject, listed
from feedback.transfer.formats.cells import normal as normal
from feedback.transfer.formats.records import SYSTEM_COLUMNS, FormatRefused

ABSENT = object()
"""Answer of `value_at` for a row without such a column."""

_SCALE = re.compile(r"(?P<low>-?\d+(?:\.\d+)?)\.\.(?P<high>-?\d+(?:\.\d+)?)")
_WORD_COLUMNS = ("rating", "thumb", "preferred")


@dataclass(frozen=True)
class Scale:
    """The lowest and the highest value a number can have; the highest is the best where low < high, else the worst."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """The value within the scale, 0 (worst) to 1 (best); outside [0, 1] where it lies outside the scale."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class ColumnMap:
    """Columns by what they hold. A name with dots is a path into nested objects and lists: `choices.0.message.content`.

    None: the column is looked for by its usual names.
    """

    prompt: str | None = None
    messages: str | None = None
    """The conversation so far; its last turn is the response where no column is one."""
    system: str | None = None
    """A system prompt, put before the messages."""
    response: str | None = None
    response_a: str | None = None
    """The first (left) of two responses that were compared."""
    response_b: str | None = None
    preferred: str | None = None
    """Column that names the preferred of the two."""
    chosen: str | None = None
    """The preferred response, where each row says it by the column it stands in."""
    rejected: str | None = None
    reasoning: str | None = None
    """The model's reasoning beside its response."""
    rating: str | None = None
    """A verdict whose kind (thumb, stars, score) is decided from the values of the whole file, or by `scale`."""
    thumb: str | None = None
    stars: str | None = None
    score: str | None = None
    correction: str | None = None
    notes: str | None = None
    tags: str | None = None
    rater: str | None = None
    id: str | None = None
    created_at: str | None = None
    agent: str | None = None
    model: str | None = None
    """The policy that answered."""
    model_a: str | None = None
    model_b: str | None = None
    unit: str | None = None
    """Column of the unit the decision was taken for: a user, a session."""
    run_id: str | None = None
    state: str | None = None
    candidates: str | None = None
    propensity: str | None = None
    reward: str | None = None
    """A measured outcome named reward."""
    outcomes: str | None = None
    """Measured outcomes: an object of numbers by their names."""
    rater_kind: str | None = None
    """human or simulated."""
    ignore: str | None = None
    """Columns that look like a verdict and are none, with + between them: `ignore=label+score_version`."""
    scale: Scale | None = None
    """Of `rating` or `score`, where its values do not say it: `rating=points:0..100`."""
    words: tuple[str, ...] = ()
    """Words for good and bad in `rating` (`rating=verdict:ok/faulty`), or for first, second and tie in
    `preferred` (`preferred=winner:0/1`)."""

    @classmethod
    def parse(cls, text: str, rater: str | None = None) -> ColumnMap:
        """A map written `prompt=question,response=answer,rating=stars`; `rating=points:0..100` says a scale,
        `rating=verdict:ok/faulty` the words for good and bad, `preferred=winner:0/1` those for first and second.

        rater: the column that names the rater, where it is said apart. Raises FormatRefused, naming the fields.
        """
        options: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, column = (side.strip() for side in part.partition("="))
            if not equals or not column:
                raise FormatRefused(f"--map: expected field=column, found {part!r}, as in {EXAMPLE}")
            if name not in FIELDS:
                raise FormatRefused(f"--map: no field {name!r}; there are {', '.join(FIELDS)}")
            if name in options:
                raise FormatRefused(f"--map: {name} stands there twice")
            column, scale, words = _column(name, column)
            options[name] = column
            options.update({"scale": scale} if scale else {}, **({"words": words} if words else {}))
        if rater:
            if options.get("rater", rater) != rater:
                raise FormatRefused(
                    f"--map says rater={options['rater']}, --rater says {rater}; say one of them"
                )
            options["rater"] = rater
        return cls(**options)

    def columns_by_field(self) -> dict[str, str]:
        """Field -> column, of the fields that are mapped."""
        return {name: column for name in FIELDS if (column := getattr(self, name)) is not None}

    def __bool__(self) -> bool:
        return bool(self.columns_by_field())

    @property
    def ignored_columns(self) -> tuple[str, ...]:
        """The columns that are left out."""
        return tuple(filter(None, (self.ignore or "").split("+")))

    @property
    def only_ignores(self) -> bool:
        """True of a map that only leaves columns out, and so goes with every format."""
        return set(self.columns_by_field()) == {"ignore"}


FIELDS = tuple(field.name for field in fields(ColumnMap) if field.name not in ("scale", "words"))
EXAMPLE = "--map prompt=question,response=answer,rating=stars"


def _column(name: str, text: str) -> tuple[str, Scale | None, tuple[str, ...]]:
    """Column, scale and words of the right side of one part of a map."""
    column, colon, rest = text.rpartition(":")
    if not colon or not column:
        return text, None, ()
    if name in ("rating", "score", "stars") and (found := _SCALE.fullmatch(rest)):
        low, high = float(found["low"]), float(found["high"])
        if low == high:
            raise FormatRefused(f"--map {name}={text}: expected two different ends of the scale")
        return column, Scale(low, high), ()
    if name in _WORD_COLUMNS and "/" in rest:
        return column, None, tuple(word.strip() for word in rest.split("/"))
    return text, None, ()


def value_at(row: JsonObject, column: str) -> object:
    """The value of a column, or at the path a dotted name says; ABSENT where there is none."""
    if column in row:
        return row[column]
    value: object = row
    for part in column.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return ABSENT
    return value


# --- Usual names --------------------------------------------------------------------------------------------

SIDE_STEMS = listed(
    """response responses message messages output outputs answer answers completion completions text reply
    generation conversation conversations"""
)
REJECTED_WORDS = listed(
    "rejected worse dispreferred non_preferred nonpreferred unpreferred reject negative losing bad"
)
ALONE = listed("chosen rejected better worse preferred dispreferred accepted reject non_preferred")
"""Words that name a response by themselves; `negative` and `bad` may be anything."""


def _sides(words: Iterable[str]) -> tuple[str, ...]:
    """What the column of the better or the worse response may be called: rejected, rejected_response, ..."""
    names = [name for word in words for stem in SIDE_STEMS for name in (f"{word}_{stem}", f"{stem}_{word}")]
    return (*(word for word in words if word in ALONE), *names)


_USUAL_NAMES = """
prompt: prompt instruction question query input prompt_text user_prompt user_message user_input input_text
    request user_query user_question user_request user_text problem problem_statement task
    task_description human post user context
messages: messages conversation conversations chat dialogue
response: response answer output completion reply assistant generation model_output
preferred: preferred preference winner choice better label vote preferred_response which_is_better
thumb: thumb thumbs thumbs_up liked like thumbs_down thumb_down disliked dislike downvoted unhelpful
    is_unhelpful
stars: stars star star_rating stars_rating
score: score
rating: rating feedback label vote verdict grade feedback_type kto_tag helpful is_helpful csat
reasoning: reasoning_content reasoning thinking thinking_content thoughts chain_of_thought
correction: correction corrected corrected_response correct_response edited_response better_response
    improved_response rewrite should_be should_have_been
notes: notes note comment comments remark remarks explanation rationale reason
tags: tags tag
rater: rater annotator annotator_id rater_id evaluator labeler labeller reviewer author user_id user
id: id uuid decision_id prompt_id example_id question_id
created_at: created_at timestamp created time date datetime
agent: agent
model: model policy model_name generator
model_a: model_a model_1 generator_1 model_left
model_b: model_b model_2 generator_2 model_right
unit: unit session_id session
run_id: run_id
state: state
candidates: candidates
propensity: propensity propensity_score
reward: reward
outcomes: outcomes
rater_kind: rater_kind
"""

NAMES: dict[str, tuple[str, ...]] = {
    "system": SYSTEM_COLUMNS,
    "chosen": _sides(listed("chosen better preferred accepted positive winning good")),
    "rejected": _sides(REJECTED_WORDS),
    **{
        field: listed(names)
        for field, names in re.findall(r"^(\w+): (.*(?:\n .*)*)", _USUAL_NAMES, re.MULTILINE)
    },
}
"""Field -> what its column is usually called, likeliest first; compared as `normal` writes them."""

PAIR_STEMS = (
    *listed("response answer output completion reply generation assistant candidate option text"),
    "",
)
PAIR_ENDS = (("a", "b"), ("1", "2"), ("left", "right"), ("one", "two"), ("first", "second"))
PAIRS: tuple[tuple[str, str], ...] = tuple(
    (f"{stem}{joint}{first}" if stem else first, f"{stem}{joint}{second}" if stem else second)
    for stem in PAIR_STEMS
    for joint in (("_", "") if stem else ("",))
    for first, second in PAIR_ENDS
    if stem or not first.isdigit()
) + tuple((f"{first}_{stem}", f"{second}_{stem}") for stem in PAIR_STEMS[:-1] for first, second in PAIR_ENDS)
"""Names of the columns of two responses: response_a and response_b, output_1 and output_2, left and right."""

PAIR_PROMPTS = frozenset((*NAMES["prompt"], "text"))
"""Columns that state the prompt beside a better and a worse response."""

REJECTED = frozenset(NAMES["rejected"])
"""Columns that make a row a preference: beside them the response, or the last turn, is the better one."""

IMAGES = listed("image images image_url image_path video videos audio audios")
"""Columns of what is no text."""

_VERDICTS = frozenset(
    listed("""thumb thumbs rating ratings rated label labels feedback score scores stars star vote votes upvote
    upvotes downvote downvotes annotator annotators annotation annotations rater raters verdict verdicts
    preference preferred winner grade grades graded liked like likes dislike dislikes disliked judgment
    judgement approval reward rewards correction corrections csat evaluation quality nps upvoted downvoted
    bewertung urteil sterne puntuacion puntuación valoracion valoración calificacion calificación avaliação
    évaluation avis valutazione voto""")
)
"""Words in English, German, Spanish, Portuguese, French and Italian."""
_RATER_NAMES = frozenset({"annotator", "annotators", "rater", "raters"})
_TRUE_OR_FALSE = frozenset(
    listed(
        """accepted approved bad chosen correct failed good harmful helpful kto ok passed rejected resolved
    satisfied solved success unhelpful wrong"""
    )
)
_ADVERSE = frozenset(
    listed(
        "bad dislike disliked dislikes downvote downvoted downvotes failed harmful rejected unhelpful wrong"
    )
)
_CLICKS = frozenset(listed("click clicked clicks conversion converted"))
_OWNER_PREFIX = re.compile(r"^(user|human|customer|overall|final|your|expert)_(?=.)")
_RANGE = re.compile(r"_\d+(_to)?_\d+$")
_SCALE_RANGE = re.compile(r"(?<![\d.])(\d+)\s*(?:-|–|\.\.|to)\s*(\d+)(?![\d.])")
_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def alias(name: str) -> str:
    """A normal name without the words that say whose it is or in which range: user_rating_1_10 is a rating."""
    return _RANGE.sub("", _OWNER_PREFIX.sub("", name)) or name


def range_in(name: str) -> Scale | None:
    """The scale that a column's name states, as in `Rating (1-10)`; None where it states none."""
    found = _SCALE_RANGE.search(name)
    if found is None or float(found[1]) >= float(found[2]):
        return None
    return Scale(float(found[1]), float(found[2]))


def is_verdict(name: str, value: object = None) -> bool:
    """True if a column's name says that it holds what somebody thought of a response, or who thought it.

    value: one of its values; of true and false more names are verdicts (`helpful`, `correct`).
    """
    words = set(normal(_HUMPS.sub("_", name)).split("_"))
    return bool(words & _VERDICTS) or (isinstance(value, bool) and bool(words & _TRUE_OR_FALSE))


def is_adverse(name: str) -> bool:
    """True of a column whose yes says that a response is bad: thumbs_down, disliked, unhelpful."""
    words = set(normal(_HUMPS.sub("_", name)).split("_"))
    return bool(words & _ADVERSE) or (
        ({"thumbs", "down"} <= words or {"thumb", "down"} <= words) and "up" not in words
    )


def verdicts_in(row: JsonObject, used: Collection[str] = ()) -> list[str]:
    """The columns of a row that look like a verdict, say something, and are not among those used."""
    return [
        name
        for name, value in row.items()
        if name not in used and value is not None and value != "" and is_verdict(name, value)
    ]


HINTS = {
    "correction": {"should", "expected", "corrected", "gold", "truth", "actual"},
    "prompt": {"message", "customer", "ticket", "mail", "email", "asked", "request", "text", "subject"},
    "response": {
        "routed",
        "answered",
        "reply",
        "replied",
        "predicted",
        "decision",
        "decided",
        "queue",
        "bot",
    },
    "rating": {"ok", "good", "right", "fine", "approved", "worked"},
}
"""Words of people's own spreadsheets, asked after the names that formats use."""


def columns_guessed(names: Iterable[str]) -> dict[str, str]:
    """Field -> column, guessed from words in the columns' names, to be checked by who brought them. A log of choices
    with their propensities has a reward, not a rating."""
    left, guesses = list(names), {}
    chances = [name for name in left if normal(name) in NAMES["propensity"]]
    needs = ("prompt", "response", *(("propensity", "reward") if chances else ("rating",)))
    for field in ("propensity", "correction", "prompt", "response", "reward", "rating", "rater"):
        if field not in (*needs, "correction", "rater") or (field in ("correction", "rater") and chances):
            continue
        usual = {*NAMES[field], *(_VERDICTS - _RATER_NAMES if field == "rating" else ())}
        usual |= _CLICKS if field == "reward" else set()
        whole = [name for name in left if normal(name) in usual]
        part = [name for name in left if _words(name) & usual]
        hinted = [name for name in left if _words(name) & HINTS.get(field, set())]
        if guess := next(iter([*whole, *part, *hinted]), None):
            guesses[field] = guess
            left.remove(guess)
    return guesses


def _words(name: str) -> set[str]:
    """The words of a column's name: `ok?` is ok."""
    return {word.strip("?!*") for word in normal(_HUMPS.sub("_", name)).split("_")}


def map_guessed(names: Iterable[str]) -> str:
    """Options of a command that map these columns as they are guessed, for a shell; what cannot be guessed stays
    COLUMN."""
    found = columns_guessed(names)
    needs = ("prompt", "response", *(("propensity", "reward") if "propensity" in found else ("rating",)))
    fields = [*needs, *(["correction"] if "correction" in found else [])]
    pairs = ",".join(f"{field}={found.get(field, 'COLUMN')}" for field in fields)
    return f"--map {shlex.quote(pairs)}" + (
        f" --rater {shlex.quote(found['rater'])}" if "rater" in found else ""
    )


def has_known_header(names: Iterable[str]) -> bool:
    """True if at least two of these columns have a name we know."""
    known = {name for names in NAMES.values() for name in names} | {name for pair in PAIRS for name in pair}
    return sum(normal(name.strip().strip('"')) in known for name in names) >= 2
