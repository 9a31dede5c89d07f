"""OpenAI's graders as reward functions: string_check, text_similarity, python, score_model, and multi of these.

A grader gives a number from 0 to 1, which is a raw reward from -2 to 2. Its templates name what they compare:
`{{ sample.output_text }}` is the answer, `{{ item.reference }}` a field of the training row.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from rl.rewards import sandbox
from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardSample, RewardValue
from rl.rewards.code_execution import AT_ONCE

PREFIX = "grader:"
"""Beginning of a reward's spec; the file of the grader follows, in a recipe its name alone."""
PLACE = re.compile(r"\{\{\s*(sample|item)\.([\w.]+)\s*\}\}")
MARK = "ratchet-grade:"


class GraderError(ValueError):
    """A grader that cannot be used, or a sample that it cannot grade."""


class GraderShape(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = ""


def _template_checked(text: str) -> str:
    if unknown := re.search(r"\{\{.{0,80}", PLACE.sub(" ", text)):
        raise ValueError(f"expected places such as {{{{ item.reference }}}}, found {unknown[0]}")
    return text


Template: TypeAlias = Annotated[str, AfterValidator(_template_checked)]


class StringCheck(GraderShape):
    type: Literal["string_check"]
    input: Template
    reference: Template
    operation: Literal["eq", "ne", "like", "ilike"]

    def grade(self, sample: RewardSample) -> float:
        found, wanted = filled(self.input, sample), filled(self.reference, sample)
        checks = {
            "eq": found == wanted,
            "ne": found != wanted,
            "like": wanted in found,
            "ilike": wanted.casefold() in found.casefold(),
        }
        return float(checks[self.operation])


class TextSimilarity(GraderShape):
    type: Literal["text_similarity"]
    input: Template
    reference: Template
    evaluation_metric: Literal[
        "fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"
    ]

    def grade(self, sample: RewardSample) -> float:
        found, wanted = filled(self.input, sample), filled(self.reference, sample)
        return similarity(self.evaluation_metric, found, wanted)


class PythonGrader(GraderShape):
    type: Literal["python"]
    source: Annotated[str, Field(max_length=256_000)]

    def grade(self, sample: RewardSample) -> float:
        known = {"sample": sample_of(sample), "item": item_of(sample)}
        program = f"{self.source}\n\nimport json as _json, sys as _sys\n_known = _json.load(_sys.stdin)\n"
        program += f"print({MARK!r} + _json.dumps(float(grade(_known['sample'], _known['item']))))\n"
        ran = sandbox.run(program, stdin=json.dumps(known))
        marked = [line for line in ran.output.splitlines() if line.startswith(MARK)]
        if not ran.ok or not marked:
            why = ran.exceeded_limit or ran.output.strip().splitlines()[-1:] or "no output"
            raise GraderError(f"its code failed: {why}"[:300])
        return float(json.loads(marked[-1].removeprefix(MARK)))


class GraderText(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["input_text", "output_text"]
    text: Template


class GraderTurn(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Template | GraderText
    type: Literal["message"] = "message"

    def filled(self, sample: RewardSample) -> dict[str, str]:
        template = self.content if isinstance(self.content, str) else self.content.text
        return {"role": self.role, "content": filled(template, sample)}


class Sampling(BaseModel):
    """How a score model is asked."""

    model_config = ConfigDict(strict=True, extra="forbid")

    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_completions_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning_effort: str | None = None


ModelAsked: TypeAlias = Callable[[str, Sequence[Mapping[str, str]], Sampling], str]
"""(model, messages, sampling) -> what a model of this server says. Raises GraderError."""
model_asked: list[ModelAsked] = []
"""Who asks the models of `score_model`; the app puts it here, as this package knows no server."""


class ScoreModel(GraderShape):
    type: Literal["score_model"]
    model: Annotated[str, Field(min_length=1, max_length=200)]
    input: Annotated[list[GraderTurn], Field(min_length=1, max_length=50)]
    range: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    sampling_params: Sampling = Sampling()

    @field_validator("range")
    @classmethod
    def range_rises(cls, ends: list[float]) -> list[float]:
        if not ends[0] < ends[1] or not all(map(math.isfinite, ends)):
            raise ValueError("expected two numbers such as [0, 1], the lower one first")
        return ends

    def grade(self, sample: RewardSample) -> float:
        if not model_asked:
            raise GraderError("no server is here whose model could be asked")
        messages = [turn.filled(sample) for turn in self.input]
        low, high = self.range
        return (score_read(model_asked[0](self.model, messages, self.sampling_params)) - low) / (high - low)


def score_read(said: str) -> float:
    """The score a model wrote: `result` of its JSON, else the last number in its text. Raises GraderError."""
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        numbers = re.findall(r"-?\d+(?:\.\d+)?", said)
        found = float(numbers[-1]) if numbers else None
    score = found.get("result") if isinstance(found, Mapping) else found
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        raise GraderError(f"its model gave no score: {said[:100]!r}")
    return float(score)


Simple: TypeAlias = Annotated[
    StringCheck | TextSimilarity | PythonGrader | ScoreModel, Field(discriminator="type")
]


class Multi(GraderShape):
    type: Literal["multi"]
    graders: Annotated[dict[str, Simple], Field(min_length=1, max_length=20)]
    calculate_output: Annotated[str, Field(max_length=1000)]

    def grade(self, sample: RewardSample) -> float:
        return calculated(
            self.calculate_output, {name: grader.grade(sample) for name, grader in self.graders.items()}
        )


Grader: TypeAlias = Annotated[
    StringCheck | TextSimilarity | PythonGrader | ScoreModel | Multi, Field(discriminator="type")
]
_reader: TypeAdapter[Any] = TypeAdapter(Grader)
KINDS = ("string_check", "text_similarity", "python", "score_model", "multi")


class GraderReward:
    """A grader as a reward function. A sample that it cannot grade has no reward; the detail says why."""

    name = "grader"

    def __init__(self, grader: Any) -> None:
        self.grader = grader

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._value, samples))

    def _value(self, sample: RewardSample) -> RewardValue:
        try:
            grade = self.grader.grade(sample)
        except (GraderError, ArithmeticError) as error:
            return RewardValue(None, {"why": str(error)})
        if not math.isfinite(grade):
            return RewardValue(None, {"why": f"its grade is {grade}"})
        return RewardValue(RAW_LOW + (RAW_HIGH - RAW_LOW) * min(max(grade, 0.0), 1.0), {"grade": grade})


def grader_read(told: object) -> Any:
    """The grader of OpenAI's JSON. Raises GraderError."""
    kind = told.get("type") if isinstance(told, dict) else None
    if kind not in KINDS:
        raise GraderError(f"expected a type of {', '.join(KINDS)}; found {str(kind)[:80]!r}")
    try:
        grader = _reader.validate_python(told)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()[:5]]
        raise GraderError("; ".join(faults)) from error
    if isinstance(grader, Multi):
        with contextlib.suppress(ArithmeticError):  # other grades may do
            calculated(grader.calculate_output, dict.fromkeys(grader.graders, 0.5))
    return grader


def grader_reward(spec: str) -> GraderReward:
    """The reward of a spec with a file. Raises GraderError."""
    path = Path(spec.removeprefix(PREFIX))
    try:
        return GraderReward(grader_read(json.loads(path.read_bytes())))
    except (OSError, ValueError) as error:
        raise GraderError(f"the grader {path.name} cannot be read: {error}") from error


def _parts(grader: Any) -> list[Any]:
    return list(grader.graders.values()) if isinstance(grader, Multi) else [grader]


def runs_code(grader: Any) -> bool:
    """True of a grader with Python code of its own."""
    return any(isinstance(part, PythonGrader) for part in _parts(grader))


def models_named(grader: Any) -> list[str]:
    """Models that a grader asks."""
    return [part.model for part in _parts(grader) if isinstance(part, ScoreModel)]


# --- Templates ----------------------------------------------------------------------------------------------


def item_of(sample: RewardSample) -> dict[str, Any]:
    """The training row without its prompt."""
    return {name: value for name, value in sample.facts.items() if name not in ("state", "tokens", "ended")}


def sample_of(sample: RewardSample) -> dict[str, Any]:
    """The answer as graders name it."""
    try:
        parsed = json.loads(sample.response)
    except (ValueError, RecursionError):
        parsed = None
    return {"output_text": sample.response, "output_json": parsed, "output_tools": []}


def filled(template: str, sample: RewardSample) -> str:
    """A template with its places filled. Raises GraderError for a place that this row or answer does not have."""
    known = {"item": item_of(sample), "sample": sample_of(sample)}

    def value(found: re.Match[str]) -> str:
        at: Any = known[found[1]]
        for part in found[2].split("."):
            if not isinstance(at, Mapping) or at.get(part) is None:
                raise GraderError(f"there is no {found[1]}.{found[2]}")
            at = at[part]
        return at if isinstance(at, str) else json.dumps(at, ensure_ascii=False)

    return PLACE.sub(value, template)


# --- Formulas of `multi` ------------------------------------------------------------------------------------

BINARY: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}


def calculated(formula: str, grades: Mapping[str, float]) -> float:
    """The value of an arithmetic formula of grades. Raises GraderError for anything else, ArithmeticError."""
    try:
        return _value_of(ast.parse(formula, mode="eval").body, grades)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise GraderError(f"calculate_output: {error}") from error


def _value_of(node: ast.expr, grades: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id=name) if name in grades:
            return grades[name]
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in BINARY:
            return BINARY[type(sign)](_value_of(left, grades), _value_of(right, grades))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value_of(operand, grades)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return float(FUNCTIONS[name](*(_value_of(one, grades) for one in args)))
    raise ValueError(f"expected numbers, {', '.join(grades)}, + - * / and {', '.join(FUNCTIONS)}")


# --- Similarity ---------------------------------------------------------------------------------------------

WORD = re.compile(r"\w+")


def similarity(metric: str, found: str, wanted: str) -> float:
    """Similarity of two texts from 0 to 1 by a metric of TextSimilarity."""
    if metric == "fuzzy_match":
        return difflib.SequenceMatcher(None, found, wanted, autojunk=False).ratio()
    own, other = (WORD.findall(text.casefold()) for text in (found, wanted))
    if metric == "rouge_l":
        return _f1(_common_subsequence(own, other), len(own), len(other))
    if metric.startswith("rouge_"):
        n = int(metric[-1])
        return _f1(_common_ngrams(own, other, n), max(len(own) - n + 1, 0), max(len(other) - n + 1, 0))
    return bleu(own, other) if metric == "bleu" else gleu(own, other)


def _f1(common: int, own: int, other: int) -> float:
    return 2 * common / (own + other) if common else 0.0


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[at : at + n]) for at in range(len(words) - n + 1))


def _common_ngrams(own: Sequence[str], other: Sequence[str], n: int) -> int:
    return (_ngrams(own, n) & _ngrams(other, n)).total()


def _common_subsequence(own: Sequence[str], other: Sequence[str]) -> int:
    row = [0] * (len(other) + 1)
    for word in own:
        before = 0
        for at, compared in enumerate(other, 1):
            before, row[at] = row[at], before + 1 if word == compared else max(row[at], row[at - 1])
    return row[-1]


def bleu(own: Sequence[str], other: Sequence[str]) -> float:
    """Geometric mean of the precisions of 1- to 4-grams with a brevity penalty (Papineni et al. 2002); a missing
    precision counts as half a match (smoothing 1 of Chen and Cherry 2014)."""
    orders = [n for n in range(1, 5) if len(own) >= n]
    if not orders or not set(own) & set(other):
        return 0.0
    logs = [math.log((_common_ngrams(own, other, n) or 0.5) / (len(own) - n + 1)) for n in orders]
    brevity = min(0.0, 1 - len(other) / len(own))
    return math.exp(brevity + math.fsum(logs) / len(logs))


def gleu(own: Sequence[str], other: Sequence[str]) -> float:
    """Smaller of precision and recall of all 1- to 4-grams together (Wu et al. 2016)."""
    common = sum(_common_ngrams(own, other, n) for n in range(1, 5))
    counts = [sum(max(len(words) - n + 1, 0) for n in range(1, 5)) for words in (own, other)]
    return common / max(counts) if max(counts) else 0.0
