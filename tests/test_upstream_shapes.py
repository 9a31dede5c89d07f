"""Shapes in which servers answer, whole and streamed, through the running gateway with OpenAI's own client.

Each shape says what the client must get and what must be on record: nothing is lost, and nothing is a 500.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from feedback.accounts.feedback_tokens import token_read
from feedback.models import Decision
from rl.serving.decision_facts import storable
from rl.serving.gateway import recorder
from tests.support.serving import openai_client, support_bot_allowed  # noqa: F401
from tests.support.stub_openai import ModelServer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("support_bot")]

ASK: Any = {"model": "support-bot", "messages": [{"role": "user", "content": "When does it ship?"}]}
TEXT = "It ships Monday."
USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
USAGE |= {"prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 3}}
LOGPROBS = {
    "content": [{"token": "It", "logprob": -0.1, "bytes": [73, 116], "top_logprobs": []}],
    "refusal": None,
}
ANNOTATION = {
    "type": "url_citation",
    "url_citation": {"url": "https://x.y", "title": "x", "start_index": 0, "end_index": 2},
}


def call(
    id: str | None = "call_1", name: str = "stock", arguments: Any = '{"sku": 4}', **more: Any
) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {**({"id": id} if id else {}), "type": "function", "function": function, **more}


@dataclass
class Shape:
    """One shape: what the server sends, what the client must get, and what must be recorded."""

    name: str
    message: Any = None
    """Of the whole answer."""
    deltas: list[Any] = field(default_factory=list)
    """Of the stream."""
    finish: str | None = "stop"
    usage: Any = field(default_factory=lambda: USAGE)
    choice: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    whole_raw: Any = None
    """The whole answer, where it is not made of the above."""
    stream_raw: bytes | None = None
    content: str | None = TEXT
    """What client and record have."""
    reasoning: str = ""
    refusal: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""
    message_has: dict[str, Any] = field(default_factory=dict)
    choice_has: dict[str, Any] = field(default_factory=dict)
    body_has: dict[str, Any] = field(default_factory=dict)
    error: int = 0
    """Status of a refusal of the whole answer."""
    breaks: bool = False
    """The stream ends with an error; `content` is what came before. None: it never begins, which is a status."""

    def whole(self) -> bytes:
        if self.whole_raw is not None:
            return (
                self.whole_raw if isinstance(self.whole_raw, bytes) else json.dumps(self.whole_raw).encode()
            )
        message = {"role": "assistant", "content": self.content} if self.message is None else self.message
        choice = {"index": 0, "message": message, "finish_reason": self.finish, **self.choice}
        usage = {} if self.usage is None else {"usage": self.usage}
        body = {"id": "chatcmpl-9", "object": "chat.completion", "created": 1, "model": "up-1"}
        body |= {"choices": [choice]}
        return json.dumps({**body, **usage, **self.body}).encode()

    def stream(self) -> bytes:
        if self.stream_raw is not None:
            return self.stream_raw
        deltas = self.deltas or [{"content": "It ships"}, {"content": " Monday."}]
        chunks = [chunk({"role": "assistant", "content": ""})]
        chunks += [chunk(delta, **(self.choice if n == 0 else {})) for n, delta in enumerate(deltas)]
        chunks[0] |= self.body
        chunks.append(chunk({}, self.finish))
        if self.usage is not None:
            chunks.append({**chunk({}), "choices": [], "usage": self.usage})
        return events(*chunks)


def chunk(delta: Any, finish: str | None = None, index: int = 0, **choice: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-9",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "up-1",
        "choices": [{"index": index, "delta": delta, "finish_reason": finish, **choice}],
    }


def events(*chunks: Any, end: str = "data: [DONE]\n\n", head: str = "data: ", eol: str = "\n\n") -> bytes:
    return ("".join(f"{head}{json.dumps(one)}{eol}" for one in chunks) + end).encode()


SAID = [chunk({"role": "assistant", "content": ""}), chunk({"content": TEXT}), chunk({}, "stop")]
COUNTED = {**chunk({}), "choices": [], "usage": USAGE}
WHOLE = json.loads(Shape("plain").whole())
OTHER = {"index": 1, "message": {"content": "Other"}, "finish_reason": "stop"}
CUSTOM = {"id": "c", "type": "custom", "custom": {"name": "sql", "input": "x"}}
NAMELESS = {"id": "c", "type": "function", "function": {"arguments": "{}"}}
FAILED = {"error": {"message": "out of memory"}}
THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "It is Friday."}]}
TWO = [("stock", '{"sku": 4}'), ("price", '{"sku": 5}')]


def calling(name: str, *parts: Any, whole: Any = None, calls: Any = None, **more: Any) -> Shape:
    """A shape of tool calls: the parts as streamed, one delta each."""
    whole = [{k: v for k, v in part.items() if k != "index"} for part in parts] if whole is None else whole
    more = {"finish": "tool_calls", **more}
    return Shape(
        name,
        {"role": "assistant", "content": None, "tool_calls": whole},
        [{"tool_calls": [part]} for part in parts],
        content=None,
        calls=TWO if calls is None else calls,
        **more,
    )


SHAPES = [
    Shape("plain", body_has={"usage": USAGE}),
    Shape("content is a list of text parts", {"role": "assistant", "content": [{"type": "text", "text": TEXT}]},
          [{"content": [{"type": "text", "text": TEXT}]}],
          message_has={"content_parts": [{"type": "text", "text": TEXT}]}),
    Shape("thinking parts", {"role": "assistant", "content": [THINKING, {"type": "text", "text": TEXT}]},
          [{"content": [THINKING]}, {"content": TEXT}], reasoning="It is Friday."),
    Shape("content is one part", {"role": "assistant", "content": {"type": "text", "text": TEXT}},
          [{"content": {"type": "text", "text": TEXT}}]),
    Shape("content parts without a type, and a text", {"content": [{"text": "It ships "}, "Monday."]},
          [{"content": [{"text": "It ships "}, "Monday."]}]),
    Shape("a refusal", {"role": "assistant", "content": None, "refusal": "I cannot help."},
          [{"refusal": "I cannot "}, {"refusal": "help."}], content=None, refusal="I cannot help."),
    Shape("a refusal as a part", {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot help."}]},
          [{"content": [{"type": "refusal", "refusal": "I cannot help."}]}], content="", refusal="I cannot help."),
    Shape("reasoning_content", {"content": TEXT, "reasoning_content": "It is Friday."},
          [{"reasoning_content": "It is "}, {"reasoning_content": "Friday."}, {"content": TEXT}],
          reasoning="It is Friday.", message_has={"reasoning_content": "It is Friday."}),
    Shape("reasoning", {"content": TEXT, "reasoning": "It is Friday."},
          [{"reasoning": "It is Friday."}, {"content": TEXT}],
          reasoning="It is Friday.", message_has={"reasoning": "It is Friday."}),
    Shape("reasoning_details", {"content": TEXT, "reasoning_details": [{"type": "reasoning.text", "text": "Friday."}]},
          [{"reasoning_details": [{"type": "reasoning.text", "text": "Friday."}]}, {"content": TEXT}],
          reasoning="Friday.",
          message_has={"reasoning_details": [{"type": "reasoning.text", "text": "Friday."}]}),
    Shape("thoughts in the text", {"content": f"<think>It is Friday.</think>{TEXT}"},
          [{"content": "<think>It is Fri"}, {"content": f"day.</think>{TEXT}"}],
          content=f"<think>It is Friday.</think>{TEXT}", reasoning="It is Friday."),
    Shape("log-probabilities", choice={"logprobs": LOGPROBS}, choice_has={"logprobs": LOGPROBS}),
    Shape("a function call of old", {"content": None, "function_call": {"name": "stock", "arguments": "{}"}},
          [{"function_call": {"name": "stock", "arguments": ""}}, {"function_call": {"arguments": "{}"}}],
          finish="function_call", content=None, message_has={"function_call": {"name": "stock", "arguments": "{}"}}),
    Shape("annotations", {"content": TEXT, "annotations": [ANNOTATION]},
          [{"content": TEXT}, {"annotations": [ANNOTATION]}], message_has={"annotations": [ANNOTATION]}),
    Shape("nulls and empty lists",
          {"content": TEXT, "audio": None, "refusal": None, "tool_calls": None, "annotations": []},
          [{"content": TEXT, "audio": None, "tool_calls": None, "refusal": None, "function_call": None}]),
    Shape("tool_calls is empty", {"content": TEXT, "tool_calls": []}, [{"content": TEXT, "tool_calls": []}]),
    calling("two calls", call(index=0), call("call_2", "price", '{"sku": 5}', index=1)),
    calling("two calls of one index", call(index=0), call("call_2", "price", '{"sku": 5}', index=0)),
    calling("two calls without an index", call(), call("call_2", "price", '{"sku": 5}')),
    calling("two calls without ids", call(None, index=0), call(None, "price", '{"sku": 5}', index=0)),
    calling("two calls without ids or an index", call(None), call(None, "price", '{"sku": 5}')),
    calling("ids are empty", call("", index=0), call("", "price", '{"sku": 5}', index=1)),
    calling("arguments are objects", call(arguments={"sku": 4}, index=0), call("call_2", "price", {"sku": 5}, index=1)),
    calling("arguments in parts", call(arguments="", index=0),
            {"index": 0, "function": {"arguments": '{"sku"'}}, {"index": 0, "function": {"arguments": ": 4}"}},
            whole=[call()], calls=[TWO[0]]),
    calling("arguments in parts without an index", call(arguments=""), {"function": {"arguments": '{"sku": 4}'}},
            call("call_2", "price", ""), {"function": {"arguments": '{"sku": 5}'}},
            whole=[call(), call("call_2", "price", '{"sku": 5}')]),
    calling("every part repeats id and name", call(arguments='{"sku"', index=0), call(arguments=": 4}", index=0),
            whole=[call()], calls=[TWO[0]]),
    calling("arguments are null", call(arguments=None, index=0), whole=[call(arguments=None)], calls=[("stock", "")]),
    calling("calls that end with stop", call(index=0), calls=[TWO[0]], finish="stop"),
    Shape("calls beside words and thoughts",
          {"content": "I look.", "reasoning_content": "Friday.", "tool_calls": [call()]},
          [{"reasoning_content": "Friday."}, {"content": "I look."}, {"tool_calls": [call(index=0)]}],
          finish="tool_calls", content="I look.", reasoning="Friday.", calls=[TWO[0]]),
    calling("one call, no list", call(index=0), whole=call(), calls=[TWO[0]]),
    Shape("no usage", usage=None, body_has={"usage": None}),
    Shape("usage is empty", usage={}, body_has={"usage": None}),
    Shape("usage of prompts alone", usage={"prompt_tokens": 9}, body_has={"usage": {"prompt_tokens": 9}}),
    Shape("fingerprint, tier and citations",
          body={"system_fingerprint": "fp_1", "service_tier": "default", "citations": ["https://x.y"]},
          body_has={"system_fingerprint": "fp_1", "service_tier": "default", "citations": ["https://x.y"]}),
    Shape("no reason to end", finish=None),
    Shape("cut at its length", finish="length"),
    Shape("filtered", {"content": ""}, [{"content": ""}], finish="content_filter", content=""),
    Shape("filtered without a message", whole_raw={"choices": [{"finish_reason": "content_filter", "index": 0}]},
          stream_raw=events(chunk(None, "content_filter")), finish="content_filter", content="", usage=None),
    Shape("filter results", choice={"content_filter_results": {"hate": {"filtered": False}}},
          choice_has={"content_filter_results": {"hate": {"filtered": False}}}),
    Shape("empty choices first, with filter results", body={"prompt_filter_results": [{"prompt_index": 0}]},
          stream_raw=events({"id": "", "object": "", "created": 0, "model": "", "choices": [],
                             "prompt_filter_results": [{"prompt_index": 0}]}, *SAID, COUNTED),
          body_has={"prompt_filter_results": [{"prompt_index": 0}]}),
    Shape("a delta is null", stream_raw=events({"choices": [{"index": 0, "delta": None}]}, *SAID, COUNTED)),
    Shape("choices are null at times", stream_raw=events({"choices": None}, *SAID, COUNTED)),
    Shape("no [DONE]", stream_raw=events(*SAID, COUNTED, end="")),
    Shape("pings and comments",
          stream_raw=b": ping\r\n\r\nevent: x\nid: 4\nretry: 5\n\ndata:\n\n" + events(*SAID, COUNTED)),
    Shape("carriage returns", stream_raw=events(*SAID, COUNTED, eol="\r\n\r\n", end="data: [DONE]\r\n\r\n")),
    Shape("no space after data:", stream_raw=events(*SAID, COUNTED, head="data:", end="data:[DONE]\n\n")),
    Shape("usage in every chunk", stream_raw=events(*({**one, "usage": USAGE} for one in SAID))),
    Shape("several choices",
          whole_raw={**WHOLE, "choices": [OTHER, *WHOLE["choices"]]},
          stream_raw=events(SAID[0], chunk({"content": "Other"}, index=1), *SAID[1:], chunk({}, "stop", 1), COUNTED)),
    Shape("a text in place of a message", whole_raw={**WHOLE, "choices": [{"text": TEXT, "finish_reason": "stop"}]},
          stream_raw=events({"choices": [{"text": TEXT, "finish_reason": "stop"}]}, COUNTED)),
    Shape("whole where a stream was asked for, and the other way round"),
    Shape("a sound", {"content": None, "audio": {"id": "a1", "data": "AAA=", "transcript": "It", "expires_at": 9}},
          [{"audio": {"id": "a1", "transcript": "I"}}, {"audio": {"transcript": "t", "data": "AAA=", "expires_at": 9}}],
          content=None, message_has={"audio": {"id": "a1", "data": "AAA=", "transcript": "It", "expires_at": 9}}),
    Shape("pictures", {"content": TEXT, "images": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
          [{"content": TEXT}, {"images": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
          message_has={"images": [{"type": "image_url", "image_url": {"url": "data:,"}}]}),
    Shape("what no database keeps", {"content": "a\x00b \ud83d"}, [{"content": "a\x00b \ud83d"}], content="a\ufffdb ?"),
    Shape("a custom tool", {"content": None, "tool_calls": [CUSTOM]},
          [{"tool_calls": [{"index": 0, "id": "c", "type": "custom", "custom": {"name": "sql", "input": ""}}]},
           {"tool_calls": [{"index": 0, "custom": {"input": "x"}}]}], finish="tool_calls", content=None,
          message_has={"tool_calls": [CUSTOM]}),
    Shape("a call without a name", {"content": None, "tool_calls": [NAMELESS]},
          [{"tool_calls": [{"index": 0, **NAMELESS}]}], content=None,
          message_has={"tool_calls": [NAMELESS]}),
    # what is no completion, or none to its end
    Shape("no JSON", whole_raw=b"<html>hi</html>", stream_raw=b"<html>hi</html>", error=502, content=None),
    Shape("no object", whole_raw=[], stream_raw=events([]), error=502, content=None),
    Shape("no choices", whole_raw={"choices": []}, stream_raw=events({"choices": []}), error=502, content=None),
    Shape("an empty choice", whole_raw={"choices": [{}]}, stream_raw=events(COUNTED), error=502, content=None),
    Shape("an error as an answer", whole_raw=FAILED,
          stream_raw=events(FAILED), error=502, content=None),
    Shape("an error within a stream", stream_raw=events(*SAID[:2], FAILED, end=""), breaks=True),
    Shape("a stream that is cut", stream_raw=events(*SAID[:2], end=""), breaks=True),
]  # fmt: skip


@pytest.fixture
def stub(settings: Any) -> Iterator[ModelServer]:
    with ModelServer() as server:
        server.headers = {"x-request-id": "req-7"}
        settings.LOCAL_BACKENDS = [server.url]
        yield server


def swapped(shape: Shape) -> bool:
    return shape.name.startswith("whole where")


def faults(shape: Shape, got: dict[str, Any], row: Decision) -> list[str]:
    """Differences between what must be got and recorded and what was."""
    message, choice, body = got["message"], got["choice"], got["body"]
    reply = storable(message.get("content") or "")
    calls = [
        (one["function"]["name"], one["function"]["arguments"])
        for one in message.get("tool_calls") or ()
        if "name" in one.get("function", {})
    ]
    recorded = json.loads(row.response) if row.metadata.get("response_is") == "messages" else []
    recorded_calls = [
        (one["function"]["name"], one["function"]["arguments"])
        for one in (recorded[0].get("tool_calls", []) if recorded else [])
    ]
    serving = row.metadata["serving"]
    wanted_text = shape.refusal or (shape.content or "").rpartition("</think>")[2]
    counts = (shape.usage or {}).get("prompt_tokens"), (shape.usage or {}).get("completion_tokens")
    pairs: dict[str, tuple[Any, Any]] = {
        "content": (reply, (shape.content or "")),
        "refusal": (message.get("refusal") or "", shape.refusal),
        "calls": (calls, shape.calls),
        "ids of calls": (all(one.get("id") for one in message.get("tool_calls") or ()), True),
        "finish": (choice["finish_reason"], shape.finish),
        "reasoning recorded": (row.reasoning, shape.reasoning),
        "calls recorded": (recorded_calls[: len(shape.calls)], shape.calls),
        "text recorded": (row.response if not recorded else recorded[0]["content"], wanted_text),
        "refusal recorded": (row.metadata.get("refusal", False), bool(shape.refusal)),
        "tokens recorded": ((row.tokens_in, row.tokens_out), counts),
        "reason recorded": (serving["finish_reason"], shape.finish),
        "request id": (serving["upstream"]["request_id"], "req-7"),
        "upstream told": (body["ratchet"]["upstream"], serving["upstream"]),
        "usage recorded": (serving.get("usage"), shape.usage or None),
    }
    for holder, wanted in (
        ("message", shape.message_has),
        ("choice", shape.choice_has),
        ("body", shape.body_has),
    ):
        pairs |= {key: (got[holder].get(key), value) for key, value in wanted.items()}
    for key, value in shape.message_has.items():
        if key not in ("reasoning_content",):
            pairs[f"{key} recorded"] = (
                serving.get("message", {}).get(key, value if recorded_calls else None),
                value,
            )
    for key, value in shape.choice_has.items():
        pairs[f"{key} recorded"] = (serving["choice"].get(key), value)
    if shape.name == "several choices":
        other = body["ratchet"]["other_choices"]
        pairs["other choices"] = ([one["content"] for one in other], ["Other"])
        pairs["other choices recorded"] = (serving["other_choices"], other)
    return [
        f"{what}: {found!r} is not {wanted!r}" for what, (found, wanted) in pairs.items() if found != wanted
    ]


def newest() -> Decision:
    assert recorder.drain(10)
    return Decision.objects.latest("created_at")


def joined_stream(client: openai.OpenAI) -> dict[str, Any]:
    """A stream as the client's own helper accumulates it, with every field."""
    from openai.lib.streaming._deltas import accumulate_delta

    message: dict[Any, Any] = {}
    choice: dict[Any, Any] = {}
    body: dict[str, Any] = {}
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    for event in client.chat.completions.create(**ASK, **options):
        sent = event.to_dict()
        body |= {key: value for key, value in sent.items() if value is not None or key not in body}
        if not event.choices:
            continue
        found: Any = sent["choices"][0]  # type: ignore[index]
        message = accumulate_delta(message, {k: v for k, v in found["delta"].items() if v is not None})
        choice |= {key: value for key, value in found.items() if value is not None or key not in choice}
    for one in message.get("tool_calls", ()):
        one.pop("index", None)
    return {"message": message, "choice": choice, "body": body}


def test_there_are_forty_shapes_and_more() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES) >= 40


def test_every_shape_whole(client: openai.OpenAI, stub: ModelServer) -> None:
    found: dict[str, Any] = {}
    for shape in SHAPES:
        stub.sends = (
            ("text/event-stream", shape.stream()) if swapped(shape) else ("application/json", shape.whole())
        )
        if shape.error:
            count = Decision.objects.count()
            with pytest.raises(openai.APIStatusError) as refusal:
                client.chat.completions.create(**ASK)
            told = (refusal.value.status_code, refusal.value.code, Decision.objects.count())
            if told != (shape.error, "bad_upstream_answer", count):
                found[shape.name] = told
            continue
        answer = client.chat.completions.create(**ASK).to_dict()
        choice: Any = answer["choices"][0]  # type: ignore[index]
        got = {"message": choice["message"], "choice": choice, "body": answer}
        if differences := faults(shape, got, newest()):
            found[shape.name] = differences
    assert found == {}


def test_every_shape_streamed(client: openai.OpenAI, stub: ModelServer) -> None:
    found: dict[str, Any] = {}
    for shape in SHAPES:
        stub.sends = (
            ("application/json", shape.whole()) if swapped(shape) else ("text/event-stream", shape.stream())
        )
        if shape.error or shape.breaks:
            with pytest.raises(openai.APIError) as refusal:
                joined_stream(client)
            if shape.breaks:
                row = newest()
                told = (row.response, row.metadata["serving"]["finish_reason"])
                if told != (TEXT, "error"):
                    found[shape.name] = told
            elif getattr(refusal.value, "status_code", 0) != shape.error:
                found[shape.name] = refusal.value
            continue
        got = joined_stream(client)
        if differences := faults(shape, got, newest()):
            found[shape.name] = differences
    assert found == {}


def test_a_retry_gets_the_same_answer_whatever_its_shape(client: openai.OpenAI, stub: ModelServer) -> None:
    for shape in SHAPES:
        if shape.error or shape.breaks or swapped(shape):
            continue
        stub.sends = ("application/json", shape.whole())
        headers = {"Idempotency-Key": shape.name}
        first = client.chat.completions.create(**ASK, extra_headers=headers).to_dict()
        newest()
        stub.sends = ("application/json", b"{}")
        again = client.chat.completions.create(**ASK, extra_headers=headers).to_dict()
        # a token is signed with the time at which it is handed out
        for answer in (first, again):
            token = answer["ratchet"].pop("feedback_token")
            assert str(token_read(token)) == answer["id"], shape.name
            assert answer["ratchet"].pop("feedback_url").endswith(f"/feedback/{token}")
        assert again == first, shape.name
