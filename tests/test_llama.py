"""llama.cpp in process: adapters on one base, exact log-probabilities, constrained answers."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import llama_cpp
import numpy as np
import pytest

from rl import llama_library
from rl.agents import AGENTS
from rl.decoding.constraint import SchemaRefused, _part_references, _properties_closed, schema_grammar
from rl.models import ServingSettings
from rl.serving import fallback
from rl.serving.base import Ask, BackendUnable, Model, Piece, ServingRefused
from rl.serving.llama import LlamaPolicy, sampled
from rl.serving.llama_context import FloatArray
from tests.support.api_client import ApiClient
from tests.support.serving import BUNDLED, Files, gguf_files, written_by_the_asking_thread  # noqa: F401

WIDGETS = AGENTS["widgets"]
STATES = [scenario.state for scenario in WIDGETS.scenarios()[::90]][:6]


@pytest.fixture(scope="module")
def files() -> Files:
    return gguf_files()


@pytest.fixture(scope="module")
def llama(files: Files) -> Iterator[LlamaPolicy]:
    with LlamaPolicy(files.base, threads=1) as policy:
        yield policy


@pytest.fixture(autouse=True)
def cold(llama: LlamaPolicy) -> None:
    llama.context.forget()


def scores(llama: LlamaPolicy, state: Any, adapter: Any = None, **more: Any) -> list[float]:
    return llama.log_probabilities(WIDGETS.render(state), WIDGETS.candidates(state), adapter, **more)


def test_scale_zero_is_the_base_to_the_last_bit(llama: LlamaPolicy, files: Files) -> None:
    base = scores(llama, STATES[0])
    llama.context.forget()
    assert scores(llama, STATES[0], files.one, scale=0.0) == base
    llama.context.forget()
    assert scores(llama, STATES[0], files.one) != base
    llama.context.forget()
    assert scores(llama, STATES[0]) == base


def test_nothing_cached_under_one_adapter_is_read_under_another(llama: LlamaPolicy, files: Files) -> None:
    alone = []
    for adapter in (None, files.one, files.two):
        llama.context.forget()
        alone.append(scores(llama, STATES[0], adapter))
    assert (
        min(abs(a - b) for x, y in ((0, 1), (1, 2)) for a, b in zip(alone[x], alone[y], strict=True)) > 1e-3
    )
    llama.context.forget()
    for _ in range(2):  # the second time all of the prompt but its end is in the cache
        for adapter, expected in zip((None, files.one, files.two), alone, strict=True):
            assert scores(llama, STATES[0], adapter) == pytest.approx(expected, abs=5e-4)


@pytest.fixture
def cramped(files: Files) -> Iterator[LlamaPolicy]:
    """Memory for two slots, and for some twenty short prompts in the prompt cache."""
    with LlamaPolicy(files.base, threads=1, cache_bytes=8 * 1024**2) as policy:
        assert policy.context.max_slots == 2
        yield policy


SCALES = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]


def test_more_adapters_than_there_are_slots_still_answer_as_alone(cramped: LlamaPolicy, files: Files) -> None:
    alone = []
    for scale in SCALES:
        cramped.context.forget()
        alone.append(scores(cramped, STATES[1], files.one, scale=scale))
    assert len({tuple(found) for found in alone}) == len(SCALES)
    for scale, expected in zip(SCALES * 2, alone * 2, strict=True):
        assert scores(cramped, STATES[1], files.one, scale=scale) == pytest.approx(expected, abs=5e-4)


def test_a_slot_given_up_is_kept(cramped: LlamaPolicy, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    decode = cramped.context._decode
    monkeypatch.setattr(
        cramped.context, "_decode", lambda rows: (computed.append(len(rows)), decode(rows))[1]
    )
    tails = sum(len(cramped.tokens(text)) for text in WIDGETS.candidates(STATES[1]))
    found = [scores(cramped, STATES[1], files.one, scale=scale) for scale in SCALES]
    computed.clear()
    again = [scores(cramped, STATES[1], files.one, scale=scale) for scale in SCALES]
    # the last token of the prompt is always computed: its logits are what is asked for
    assert sum(computed) == len(SCALES) * (1 + tails)
    assert again == [pytest.approx(values, abs=5e-4) for values in found]


def test_the_prompt_cache_stays_within_its_bytes(cramped: LlamaPolicy, files: Files) -> None:
    cache = cramped.context._prompt_cache
    cache.max_bytes = 250_000  # two prompts of 50 tokens, at 2,048 bytes each and a little
    for scale in SCALES * 2:
        scores(cramped, STATES[1], files.one, scale=scale)
        assert 0 <= cache.bytes <= cache.max_bytes
    assert 0 < sum(cache.get((str(files.one), scale)) is not None for scale in SCALES) < len(SCALES) - 2
    cramped.context.forget()
    assert cache.bytes == 0


def test_there_are_as_many_slots_as_memory_holds(files: Files) -> None:
    with LlamaPolicy(files.base, threads=1) as roomy:
        one = roomy.context.slot_bytes()
    # keys and values: 4 layers of 2 heads of 64 + 64 numbers of 2 bytes, for 2,048 + 512 tokens
    assert one > 4 * 2 * (64 + 64) * 2 * 2560
    with LlamaPolicy(files.base, threads=1, cache_bytes=5 * one) as policy:
        for scale in SCALES:
            policy.context.use(files.one, scale)
        assert len(policy.context._slots) == 3  # three quarters of five, the rest is for the prompt cache


@pytest.mark.slow
def test_two_versions_are_their_merged_models(llama: LlamaPolicy, files: Files, tmp_path: Path) -> None:
    from rl.export.gguf import writer_for
    from rl.export.source import source_open

    versions = {files.one: files.one_folder, files.two: files.two_folder}
    merged: dict[Path, list[list[float]]] = {}
    for adapter, folder in versions.items():
        whole = writer_for(source_open(str(BUNDLED), folder))
        whole.write(tmp_path / adapter.name, "f16", adapter.stem, lambda *_: None)
        with LlamaPolicy(tmp_path / adapter.name, threads=1) as alone:
            merged[adapter] = [scores(alone, state) for state in STATES]
    for number, state in enumerate(STATES):  # in turn, as requests come
        for adapter in versions:
            assert scores(llama, state, adapter) == pytest.approx(merged[adapter][number], abs=0.05)
    # else the test would pass for one adapter standing in for the other, or for none
    one, two = (np.array(merged[adapter]) for adapter in versions)
    base = np.array([scores(llama, state) for state in STATES])
    assert min(abs(one - two).max(), abs(one - base).max(), abs(two - base).max()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("which", ["base", "one", "two"])
def test_log_probabilities_are_those_of_transformers(llama: LlamaPolicy, files: Files, which: str) -> None:
    from rl.training.hardware import detect
    from rl.training.policy import load_policy
    from rl.training.scoring import score_responses

    folder = {"base": None, "one": files.one_folder, "two": files.two_folder}[which]
    adapter = {"base": None, "one": files.one, "two": files.two}[which]
    # in bfloat16 torch itself is 0.11 nats away from what it says in float64; llama.cpp is 0.01
    exact = dataclasses.replace(detect(), dtype="float32", matmul_precision="highest")
    original = load_policy("bundled", adapter=folder, hardware=exact)
    for state in STATES[:3]:
        items = [(WIDGETS.render(state), response) for response in WIDGETS.candidates(state)]
        expected = [score.logp for score in score_responses(original, items)]
        assert scores(llama, state, adapter) == pytest.approx(expected, abs=0.03)


def test_the_shared_prompt_is_computed_once(llama: LlamaPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    decode = llama.context._decode
    monkeypatch.setattr(llama.context, "_decode", lambda rows: (computed.append(len(rows)), decode(rows))[1])
    state = STATES[0]
    prompt = llama.tokens(llama.render(WIDGETS.render(state)))
    tails = sum(len(llama.tokens(text)) for text in WIDGETS.candidates(state))
    scores(llama, state)
    assert sum(computed) == len(prompt) + tails
    computed.clear()
    scores(llama, state)
    assert sum(computed) == 1 + tails


def test_branches_leave_the_prompt_as_it_was(llama: LlamaPolicy) -> None:
    ask = Ask(WIDGETS.render(STATES[2]), max_tokens=16)
    before = llama.answer(ask).text
    scores(llama, STATES[2])
    assert llama.answer(ask).text == before


def test_many_candidates_are_scored_in_groups(llama: LlamaPolicy) -> None:
    state = {**STATES[0], "widgets": [f"widget_{i}" for i in range(40)]}
    found = scores(llama, state)
    llama.context.forget()
    one_by_one = [llama.log_probabilities(WIDGETS.render(state), [c])[0] for c in WIDGETS.candidates(state)]
    assert found == pytest.approx(one_by_one, abs=2e-3)


def test_a_constrained_agent_never_names_what_is_not_listed(llama: LlamaPolicy, files: Files) -> None:
    for seed, state in enumerate(STATES):
        schema = WIDGETS.response_schema(state)
        ask = Ask(WIDGETS.render(state), 48, temperature=3.0, seed=seed, response_schema=schema)
        WIDGETS.parse(llama.answer(ask, files.one).text, state)


TASKS = ["c3", "c33", "c", 'the "red" one', "écrire", "\N{GRINNING FACE}"]
"""Names that begin with each other, and that need escapes or more bytes than one."""


def test_an_ordering_repeats_no_item_whatever_the_heat(llama: LlamaPolicy, files: Files) -> None:
    prioritizer, state = AGENTS["prioritizer"], {"goal": "go on", "tasks": TASKS}
    schema = prioritizer.response_schema(state)
    for seed in range(4):
        ask = Ask(prioritizer.render(state), 128, temperature=3.0, seed=seed, response_schema=schema)
        answer = llama.answer(ask, files.one)
        assert sorted(prioritizer.parse(answer.text, state)["order"]) == sorted(TASKS), answer.text


class Llama:
    """The one base as a backend, in this thread."""

    name = "llama"

    def __init__(self, policy: LlamaPolicy) -> None:
        self.policy = policy

    def pieces(self, ask: Ask, model: Model, timeout_s: float) -> Iterator[Piece]:
        return self.policy.stream(ask)


@pytest.mark.django_db
@pytest.mark.usefixtures("written_at_once")
def test_orderings_over_rest_are_valid(llama: LlamaPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "backends", lambda: [Llama(llama)])
    ServingSettings.objects.create(agent="prioritizer", temperature=2.0)
    api, prioritizer = ApiClient("ingest"), AGENTS["prioritizer"]
    state = {"goal": "go on", "tasks": ["c1", "c2", "c3"]}
    decided = api.post("/api/decide/", {"agent": "prioritizer", "state": state})
    assert decided.status_code == 201, decided.content
    assert sorted(json.loads(decided.content)["action"]["order"]) == ["c1", "c2", "c3"]
    schema = {"name": "order", "schema": prioritizer.response_schema(state)}
    body = {
        "model": "prioritizer",
        "messages": prioritizer.render(state),
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    answered = json.loads(api.post("/v1/chat/completions", body).content)
    order = prioritizer.parse(answered["choices"][0]["message"]["content"], state)["order"]
    assert sorted(order) == ["c1", "c2", "c3"]


def test_a_list_that_can_only_repeat_is_refused(llama: LlamaPolicy) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2}
    schema |= {"maxItems": 2}
    for seed in range(4):
        ask = Ask(WIDGETS.render(STATES[0]), 64, temperature=3.0, seed=seed, response_schema=schema)
        assert sorted(json.loads(llama.answer(ask).text)) == [False, True]
    three = {**schema, "minItems": 3, "maxItems": 3}
    with pytest.raises(ServingRefused, match="JSON schema"):
        llama.answer(Ask(WIDGETS.render(STATES[0]), 64, response_schema=three))


def test_the_probability_of_a_drawn_answer_is_the_one_it_is_scored_with(llama: LlamaPolicy) -> None:
    messages = WIDGETS.render(STATES[0])
    answer = llama.answer(Ask(messages, 32, temperature=1.0, seed=3))
    assert answer.finish_reason == "stop"
    assert answer.log_probability == pytest.approx(
        llama.log_probabilities(messages, [answer.text])[0], abs=2e-3
    )


@pytest.mark.parametrize("temperature", [None, 0.0, 3.0])
def test_confidence_is_the_models_own_however_it_draws(llama: LlamaPolicy, temperature: float | None) -> None:
    messages = WIDGETS.render(STATES[0])
    ask = Ask(messages, 32, temperature=temperature, seed=3, stop=())
    answer = llama.answer(dataclasses.replace(ask, confidence=True))
    assert answer.finish_reason == "stop"
    (logp,) = llama.log_probabilities(messages, [answer.text])
    assert answer.tokens_out is not None
    assert answer.confidence == pytest.approx(math.exp(logp / answer.tokens_out), abs=2e-3)
    assert answer.confidence < 1
    assert llama.answer(ask).confidence is None


def test_the_same_seed_draws_the_same_answer(llama: LlamaPolicy) -> None:
    def drawn(seed: int) -> str:
        llama.context.forget()
        return llama.answer(Ask(WIDGETS.render(STATES[0]), 24, temperature=2.0, seed=seed)).text

    assert drawn(5) == drawn(5)
    assert len({drawn(seed) for seed in range(5)}) > 1


def test_pieces_are_the_answer(llama: LlamaPolicy) -> None:
    ask = Ask(WIDGETS.render(STATES[0]), 32)
    pieces = list(llama.stream(ask))
    whole = llama.answer(ask)
    assert "".join(piece.text for piece in pieces) == whole.text
    expected = ("stop", whole.tokens_in, whole.tokens_out)
    assert (pieces[-1].finish_reason, pieces[-1].tokens_in, pieces[-1].tokens_out) == expected
    assert all(piece.finish_reason is None for piece in pieces[:-1])


def test_the_length_limit_and_a_stop_text_end_an_answer(llama: LlamaPolicy) -> None:
    answer = llama.answer(Ask(WIDGETS.render(STATES[0]), 3))
    assert (answer.finish_reason, answer.tokens_out) == ("length", 3)
    answer = llama.answer(Ask(WIDGETS.render(STATES[0]), 32, stop=['": "']))
    assert (answer.text, answer.finish_reason) == ('{"widget', "stop")


def test_what_it_cannot_do_it_says(llama: LlamaPolicy) -> None:
    extras: list[dict[str, Any]] = [
        {"tools": [{"type": "function"}]},
        {"logit_bias": {"5": 1}},
        {"logprobs": True},
    ]
    for extra in (*extras, {"n": 2}):
        with pytest.raises(BackendUnable, match=next(iter(extra))):
            llama.answer(Ask(WIDGETS.render(STATES[0]), extra=extra))
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    one = llama.render([{"role": "user", "content": parts}])
    assert one == llama.render([{"role": "user", "content": "one two"}])
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(BackendUnable, match="text only"):
        llama.answer(Ask([{"role": "user", "content": [*parts, picture]}]))
    with pytest.raises(ServingRefused, match="2048") as refusal:
        llama.answer(Ask([{"role": "user", "content": "word " * 5000}]))
    assert refusal.value.code == "context_length_exceeded"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def test_a_schema_that_cannot_constrain_is_refused(llama: LlamaPolicy) -> None:
    odd: list[dict[str, Any]] = [
        {"$ref": "https://example.org/x.json"},
        {"type": "banana"},
        {"allOf": 5},
        {"enum": []},
    ]
    odd += [{"anyOf": True, "properties": {"a": {}}}, {"properties": {"a": 5}}, {"properties": [1]}]
    for schema in (*odd, nested(200), nested(900)):
        with pytest.raises(SchemaRefused, match="schema"):
            schema_grammar(schema)
    with pytest.raises(SchemaRefused, match="look-around"):
        schema_grammar(_field({"type": "string", "pattern": "(?=a)b"}))
    with pytest.raises(ServingRefused, match="32,768 characters"):
        llama.answer(Ask(WIDGETS.render(STATES[0]), response_schema={"enum": ["x" * 40_000]}))


def _field(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 1, "maximum": 5},
        {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 12},
        {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
        {"type": "number", "minimum": 0.25, "maximum": 1},
        {"type": ["integer", "null"], "minimum": 90, "maximum": 110},
        {"type": ["string", "null"], "enum": ["low", "high", None]},
        {"allOf": [{"$ref": "#/$defs/Colour"}]},
        {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}], "description": "of the door"},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$", "maxLength": 6},
        {"type": "string", "format": "date"},
        {"type": "array", "minItems": 2, "maxItems": 3, "items": {"type": "boolean"}},
        {"type": "array", "prefixItems": [{"const": 1}, {"enum": ["a"]}], "items": False, "minItems": 2},
        {"oneOf": [{"const": "a"}, {"type": "integer", "minimum": 1, "maximum": 2}]},
    ],
    ids=json.dumps,
)
def test_random_answers_fit_any_schema(llama: LlamaPolicy, schema: dict[str, Any]) -> None:
    whole = {**_field(schema), "$defs": {"Colour": {"enum": ["red", "gr\u00fcn"]}}}
    for seed in range(6):
        answer = llama.answer(
            Ask(WIDGETS.render(STATES[0]), 256, temperature=1.5, seed=seed, response_schema=whole)
        )
        jsonschema.validate(json.loads(answer.text), whole)
        assert answer.finish_reason == "stop"


def test_objects_are_closed_but_where_several_schemas_describe_them() -> None:
    part = {"properties": {"age": {"type": "integer"}}}
    schema = {
        "properties": {
            "one": {"$ref": "#/$defs/Alone"},
            "both": {"allOf": [{"$ref": "#/$defs/Named"}, part]},
            "free": {"properties": {}, "additionalProperties": True},
        },
        "$defs": {"Alone": part, "Named": part},
    }
    assert _properties_closed(schema, set(_part_references(schema))) == {
        "properties": schema["properties"],
        "additionalProperties": False,
        "$defs": {"Alone": {**part, "additionalProperties": False}, "Named": part},
    }


def test_properties_that_a_schema_does_not_name_are_not_made_up_and_a_number_ends(llama: LlamaPolicy) -> None:
    kinds: list[tuple[dict[str, Any], float]] = [({"enum": [1, 2]}, 3.0), ({"type": "integer"}, 9.0)]
    for schema, heat in (*kinds, ({"type": "number"}, 9.0)):
        for seed in range(4):
            asked = Ask(
                WIDGETS.render(STATES[0]), 256, temperature=heat, seed=seed, response_schema=_field(schema)
            )
            answer = llama.answer(asked)
            assert answer.finish_reason == "stop"
            assert set(json.loads(answer.text)) == {"x"}


def test_a_nucleus_is_the_smallest_set_that_reaches_its_share() -> None:
    logits = np.log(np.array([0.5, 0.1, 0.3, 0.1], np.float32))

    def drawn(top_p: float) -> dict[int, float]:
        draws = [sampled(logits, 1.0, top_p, np.random.default_rng(seed)) for seed in range(60)]
        return {token: float(np.exp(nats)) for token, nats in draws}

    # 0.5 + 0.3 reaches 0.75; what is left is shared out again: 5/8, 3/8
    assert drawn(0.75) == {0: pytest.approx(0.625), 2: pytest.approx(0.375)}
    assert drawn(0.01) == {0: pytest.approx(1.0)}
    assert drawn(1.0) == {n: pytest.approx(share) for n, share in enumerate([0.5, 0.1, 0.3, 0.1])}


def test_a_nucleus_of_more_tokens_than_are_looked_at_first_is_whole() -> None:
    even = np.zeros(1000, np.float32)
    draws = {sampled(even, 1.0, 0.5, np.random.default_rng(seed)) for seed in range(400)}
    assert len(draws) > 250
    assert max(token for token, _ in draws) < 500
    assert {round(float(np.exp(nats)) * 500) for _, nats in draws} == {1}


def test_forced_tokens_are_one_batch(llama: LlamaPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    append = llama.context.append

    def counted(tokens: Sequence[int]) -> FloatArray:
        batches.append(len(tokens))
        return append(tokens)

    schema = {"enum": [{"a_long_name_of_a_field": True}, {"a_long_name_of_a_field": False}]}
    monkeypatch.setattr(llama.context, "append", counted)
    answer = llama.answer(Ask(WIDGETS.render(STATES[0]), 64, response_schema=schema))
    assert json.loads(answer.text) in schema["enum"]
    assert len(batches) < answer.tokens_out - 2
    # the same tokens are written, and cut at the same place, when the limit falls among them
    for limit in range(1, answer.tokens_out):
        cut = llama.answer(Ask(WIDGETS.render(STATES[0]), limit, response_schema=schema))
        assert (cut.tokens_out, cut.finish_reason) == (limit, "length")
        assert answer.text.startswith(cut.text)


def test_probabilities_of_all_answers_sum_to_no_more_than_one(llama: LlamaPolicy) -> None:
    assert sum(math.exp(score) for score in scores(llama, STATES[0])) <= 1.0


def test_a_file_that_is_no_model_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ServingRefused, match="found none"):
        LlamaPolicy(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ServingRefused, match="cannot read"):
        LlamaPolicy(tmp_path / "bad.gguf")


def test_an_answer_is_taken_from_the_closed_set_whatever_the_heat(llama: LlamaPolicy, files: Files) -> None:
    answers = ('Say "no".', "Watch Heat.\nTonight.", "Ärger\\vermeiden")
    hello = [{"role": "user", "content": "Hello"}]
    asks = [Ask(hello, 48, temperature=3.0, seed=seed, answers=answers) for seed in range(8)]
    drawn = [llama.answer(ask, files.one) for ask in asks]
    assert {answer.text for answer in drawn} <= set(answers)
    assert {answer.finish_reason for answer in drawn} == {"stop"}
    assert len({answer.text for answer in drawn}) > 1


@pytest.mark.parametrize("flags", ["fpu amx_tile amx_int8", "fpu avx2"])
def test_amx_units_are_left_alone(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = getattr(
        llama_cpp.llama_model_default_params, "ratchet_stock", llama_cpp.llama_model_default_params
    )
    for module in (llama_cpp, llama_cpp.llama_cpp):
        monkeypatch.setattr(module, "llama_model_default_params", stock)
    (tmp_path / "cpuinfo").write_text(flags)
    monkeypatch.setattr(llama_library, "PROCESSOR", tmp_path / "cpuinfo")
    llama_library.amx_avoid()
    llama_library.amx_avoid()
    assert llama_cpp.llama_cpp.llama_model_default_params().use_extra_bufts is ("amx_tile" not in flags)
