"""Text drawn at random under a schema's grammar fits the schema: schemas drawn too, a vocabulary of bytes."""

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from rl.decoding.constraint import MAX_DIGITS, Constraint, GrammarVocabulary

NAMES = ("a", "b", "properties", "$ref", "größe", "x y", "items", "0")
DIGITS = np.arange(ord("0"), ord("9") + 1)
CLOSING = b'"}],'


class ByteTokenizer:
    """A vocabulary of all bytes and an end, as llguidance reads one."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    tokenizer = LLTokenizer(TokenizerWrapper(ByteTokenizer()))
    return GrammarVocabulary(tokenizer, 257, lambda token: bytes([token]) if token < 256 else b"")


def schema_drawn(random: Random, depth: int) -> dict[str, Any]:
    """A schema of values, or of objects, arrays and alternatives of such."""
    kind = random.random()
    if depth == 0 or kind < 0.45:
        return value_schema(random)
    if kind < 0.75:
        properties = {
            name: schema_drawn(random, depth - 1) for name in random.sample(NAMES, random.randint(1, 3))
        }
        required = [name for name in properties if random.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required}
    if kind < 0.88:
        least, most = random.randint(0, 1), random.randint(1, 3)
        return {
            "type": "array",
            "items": schema_drawn(random, depth - 1),
            "minItems": least,
            "maxItems": most,
        }
    if kind < 0.95:
        return {"anyOf": [schema_drawn(random, depth - 1), schema_drawn(random, depth - 1)]}
    return {"allOf": [schema_drawn(random, depth - 1)], "title": "as pydantic writes it"}


def value_schema(random: Random) -> dict[str, Any]:
    whole, part = random.randint(-200, 200), round(random.uniform(-3, 3), 2)
    upper = random.choice(("maximum", "exclusiveMaximum"))
    return random.choice(
        (
            {"enum": random.sample(["x", "yy", 'q"', 1, 2.5, None, True, "ünï"], random.randint(1, 4))},
            {"type": "integer", "minimum": whole, upper: whole + random.randint(1, 300)},
            {"type": "integer", "minimum": whole, "maximum": whole + 20, "multipleOf": random.choice((2, 5))},
            {"type": "number", "exclusiveMinimum": part, upper: round(part + random.uniform(0.1, 5), 2)},
            {"type": random.choice(("boolean", "null"))},
            {"type": "string", "pattern": random.choice(("^[a-c]{1,3}$", "^x?y$"))},
            {"type": "string", "format": random.choice(("date", "time", "uuid"))},
            {"type": "string", "minLength": 1, "maxLength": random.randint(1, 3)},
            {"const": random.choice(("k", 3, {"a": [1]}, []))},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        )
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_text_under_a_random_schema_fits_it(vocabulary: GrammarVocabulary, seed: int) -> None:
    random = Random(seed)
    for _ in range(40):
        schema = schema_drawn(random, 3)
        text = text_drawn(random, Constraint.of_schema(vocabulary, schema))
        jsonschema.validate(json.loads(text), schema)


def test_numbers_within_a_schema(vocabulary: GrammarVocabulary) -> None:
    # texts of a closed set may hold longer numbers
    texts = ("account " + "1" * 24, "account " + "1" * 23 + "x")
    drawn = {text_drawn(Random(seed), Constraint.of_answers(vocabulary, texts)) for seed in range(20)}
    assert drawn == set(texts)
    # whole numbers of 64 bits can be written and none much longer
    constraint = Constraint.of_schema(vocabulary, {"type": "integer"})
    for _ in range(MAX_DIGITS):
        assert constraint.token_mask()[DIGITS].any()
        constraint.accept(ord("9"))
    assert len(str(2**63)) <= MAX_DIGITS
    assert not constraint.token_mask()[DIGITS].any()


def test_a_copy_goes_its_own_way(vocabulary: GrammarVocabulary) -> None:
    schema = {"type": "array", "items": {"enum": [1, 22]}, "uniqueItems": True, "minItems": 2}
    one = Constraint.of_schema(vocabulary, schema)
    for token in b"[1":
        one.accept(token)
    other = one.copy()
    for token in b",22":
        assert one.allowed_tokens()[token]
        one.accept(token)
    assert one.allowed_tokens()[ord("]")]
    assert not other.allowed_tokens()[ord("]")]
    other.accept(ord(","))
    assert not other.allowed_tokens()[ord("1")]  # it is written already, which the copy remembers
    other.accept(ord("2"))
    assert one.allowed_tokens()[ord("]")]


def text_drawn(random: Random, constraint: Constraint) -> str:
    """A text of random bytes that the constraint allows, closed as soon as may be in half of the steps."""
    text = b""
    while True:
        allowed = [int(token) for token in np.flatnonzero(constraint.token_mask())]
        assert allowed, text
        if allowed[-1] == ByteTokenizer.eos_token_id and (len(allowed) == 1 or random.random() < 0.5):
            return text.decode()
        possible = [token for token in allowed if token < 256]
        closing = [token for token in possible if token in CLOSING]
        token = random.choice(closing if closing and random.random() < 0.5 else possible)
        constraint.accept(token)
        text += bytes([token])
