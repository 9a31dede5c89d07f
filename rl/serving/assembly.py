"""Assemble an answer out of its pieces: a stream and a whole answer come to the same message."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from feedback.messages import REASONING_PARTS, TEXT_PARTS, ChatMessage, MessageError, message_read
from feedback.storage.masking import PARTIAL, Masker
from rl.serving.base import Answer, Piece

PARTS = "content_parts"
"""Field of a message with the parts of a content that came as a list; `content` is their text."""
_SET = {"role", "type", "id", "index", "name", "format", "tool_call_id"}
"""Fields of a delta that are said once, so that a later one replaces the earlier."""


@dataclass
class Assembly:
    """A message on its way. `read` takes a delta, or a whole message, as a server sent it; `add` joins it."""

    message: dict[str, Any] = field(default_factory=lambda: {"role": "assistant", "content": None})
    """The message so far, as a client gets it."""
    _calls: list[dict[str, object]] = field(default_factory=list)
    """Calls as far as they were read."""
    _unnamed: set[int] = field(default_factory=set)
    """Places of calls whose id is ours, as the server sent none."""
    _at: dict[int, int] = field(default_factory=dict)
    """A server's index of a call -> its place in the list."""

    def read(self, sent: Any, *, whole: bool = False) -> dict[str, object]:
        """A delta as OpenAI streams it: content as a text, calls with an index of their own, arguments as text."""
        if not isinstance(sent, Mapping):
            return {}
        delta = {key: value for key, value in sent.items() if value is not None or whole}
        delta.pop("role", None)
        content = delta.pop("content", None)
        if isinstance(content, Mapping):
            content = [content]
        if isinstance(content, list):
            delta |= _parts_split(content, delta)
        elif content is not None:
            delta["content"] = content if isinstance(content, str) else json.dumps(content)
        if isinstance(call := delta.get("function_call"), Mapping):
            delta["function_call"] = _arguments_as_text(call)
        if isinstance(calls := delta.get("tool_calls"), Mapping):
            delta["tool_calls"] = [calls]
        if isinstance(calls := delta.get("tool_calls"), list):
            delta["tool_calls"] = [self._call(call, whole) for call in calls if isinstance(call, Mapping)]
        return delta

    def add(self, delta: Mapping[str, object]) -> None:
        """Join a delta that `read` returned."""
        for key, value in delta.items():
            if key == "tool_calls" and isinstance(value, list):
                calls = self.message.setdefault("tool_calls", [])
                for call in value:
                    _call_join(calls, call)
            elif key == "content" and not self.message["content"]:
                self.message["content"] = value
            else:
                self.message[key] = joined(key, self.message.get(key), value)

    def typed(self) -> ChatMessage:
        """The message as it is recorded. What cannot be read stays in it as an extra field."""
        sent = dict(self.message)
        if isinstance(parts := sent.pop(PARTS, None), list):
            # the parts' reasoning and refusals stand in their own fields already
            kept = [part for part in parts if not _is_words(part)]
            words = [{"type": "text", "text": sent["content"]}] if sent["content"] else []
            sent["content"] = [*words, *kept] if kept else sent["content"]
        try:
            return message_read(sent, role="assistant").model_copy(update={"role": "assistant"})
        except MessageError:
            text = sent["content"] if isinstance(sent["content"], str) else ""
            return ChatMessage.model_validate({"role": "assistant", "content": text, "unread": sent})

    def _call(self, sent: Mapping[str, Any], whole: bool) -> dict[str, object]:
        """A part of a call, with the place of its call as index. A new id is a new call, whatever its index says."""
        call = {key: value for key, value in sent.items() if value is not None}
        if "function" not in call and isinstance(call.get("name"), str):
            call["function"] = {key: call.pop(key) for key in ("name", "arguments") if key in call}
        if isinstance(call.get("function"), Mapping):
            call["function"] = _arguments_as_text(call["function"])
        place = None if whole else self._place(call)
        index = call.pop("index", None)
        if place is None:
            place = len(self._calls)
            if not call.get("id"):
                self._unnamed.add(place)
                call["id"] = f"call_{uuid.uuid4().hex[:24]}"
            call.setdefault("type", "function")
        else:
            # said once: clients join the texts of a call's parts
            before = self._calls[place]
            call = {
                key: value for key, value in call.items() if key not in before or key not in ("id", "type")
            }
            if isinstance(call.get("function"), Mapping) and _name(before):
                call["function"] = {key: part for key, part in call["function"].items() if key != "name"}
        if isinstance(index, int):
            self._at[index] = place
        call["index"] = place
        _call_join(self._calls, call)
        return call

    def _place(self, call: Mapping[str, object]) -> int | None:
        """Place of the call that a part goes on with; None: it begins a call."""
        calls, named, index = self._calls, _name(call), call.get("index")
        at = self._at.get(index) if isinstance(index, int) else len(calls) - 1 if calls else None
        if id := call.get("id"):
            known = next((n for n, one in enumerate(calls) if one.get("id") == id), None)
            if known is not None:
                return known
            return at if at is not None and at in self._unnamed and not named else None
        if at is None:
            # a part without a name goes on with the call before, whatever its index says
            return len(calls) - 1 if calls and not named else None
        before = calls[at]
        is_begun = named and _name(before) and (index is None or _is_json(_arguments(before)))
        return None if is_begun else at


def answer_of(pieces: Iterable[Piece], latency_ms: float) -> Answer:
    """The answer that its pieces come to; without a last one the answer was left."""
    assembly, known, reason = Assembly(), Piece(), "left"  # type: tuple[Assembly, Piece, str | None]
    for piece in pieces:
        assembly.add(piece.delta)
        if piece.end or piece.tokens_in is not None or piece.extras is not Piece.extras:
            known = piece
        reason = piece.finish_reason if piece.end else reason
    return Answer(
        assembly.typed(),
        known.tokens_in,
        known.tokens_out,
        latency_ms,
        reason,
        assembly.message,
        known.log_probability,
        known.chosen,
        known.extras,
        known.confidence,
    )


class Restorer:
    """Gives the words that were masked back in pieces, also where a placeholder comes in two of them."""

    def __init__(self, masker: Masker) -> None:
        self._masker = masker
        self._held: dict[str | int, str] = {}
        """Field of the message, or index of a tool call -> its text's end, which may begin a placeholder."""

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """The piece with its words; before the last one whatever was held back."""
        if not self._masker.has_masked:
            yield piece
            return
        delta = {
            name: self._text(name, value) if isinstance(value, str) else self._masker.restored(value)
            for name, value in piece.delta.items()
            if name != "tool_calls"
        }
        calls = piece.delta.get("tool_calls")
        if isinstance(calls, list):
            delta["tool_calls"] = [self._call(call) for call in calls]
        if piece.end and self._held:
            texts = {name: text for name, text in self._held.items() if isinstance(name, str)}
            ends = [
                {"index": place, "function": {"arguments": text}}
                for place, text in self._held.items()
                if isinstance(place, int)
            ]
            yield Piece({**texts, **({"tool_calls": ends} if ends else {})})
            self._held = {}
        yield replace(piece, delta=delta)

    def _text(self, key: str | int, text: str) -> str:
        text = self._masker.restored(self._held.pop(key, "") + text)
        if partial := PARTIAL.search(text):
            self._held[key] = partial[0]
            text = text[: partial.start()]
        return text

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function, place = call.get("function"), call.get("index")
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
            return call
        said = self._text(place if isinstance(place, int) else 0, function["arguments"])
        return {**call, "function": {**function, "arguments": said}}


def delta_indexed(message: Mapping[str, object]) -> dict[str, object]:
    """A whole message as one delta."""
    delta = {key: value for key, value in message.items() if key != "role" and value is not None}
    if isinstance(calls := delta.get("tool_calls"), list):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    return delta


def _parts_split(parts: list[object], delta: Mapping[str, object]) -> dict[str, object]:
    """The fields that the parts of a content come to: their text, reasoning, refusal, and the parts themselves."""
    found: dict[str, object] = {"content": "".join(_text(part) for part in parts), PARTS: list(parts)}
    try:
        # a part of another kind is kept as it is
        readable = [part for part in parts if isinstance(part, Mapping) and isinstance(part.get("type"), str)]
        read = message_read({"role": "assistant", "content": readable})
    except MessageError:
        return found
    if read.reasoning and not any(delta.get(key) for key in ("reasoning_content", "reasoning")):
        found["reasoning_content"] = read.reasoning
    if read.refusal and not delta.get("refusal"):
        found["refusal"] = read.refusal
    return found


def _text(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type", "text") not in TEXT_PARTS:
        return ""
    words = part.get("text", "")
    if isinstance(words, Mapping):  # the Assistants API has {value, annotations}
        words = words.get("value", "")
    return words if isinstance(words, str) else ""


def _is_words(part: object) -> bool:
    """True for parts whose content stands in another field of the message too."""
    if not isinstance(part, Mapping):
        return True
    return part.get("type", "text") in (*TEXT_PARTS, *REASONING_PARTS, "refusal")


def _arguments_as_text(function: Mapping[str, object]) -> dict[str, object]:
    found = dict(function)
    arguments = found.get("arguments", "")
    if not isinstance(arguments, str):
        found["arguments"] = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return found


def _name(call: Mapping[str, object]) -> str:
    function = call.get("function")
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


def _arguments(call: Mapping[str, object]) -> str:
    function = call.get("function")
    return str(function.get("arguments") or "") if isinstance(function, Mapping) else ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _call_join(calls: list[dict[str, object]], part: Mapping[str, Any]) -> None:
    place = int(part.get("index") or 0)
    while len(calls) <= place:
        calls.append({})
    call = calls[place]
    for key, value in part.items():
        if key != "index":
            call[key] = joined(key, call.get(key), value)


def joined(key: str, before: object, more: object) -> object:
    """A field of a message so far and what comes to it: texts and lists go on, objects field by field."""
    if before is None or more is None:
        return more if before is None else before
    if isinstance(before, str) and isinstance(more, str):
        return (more or before) if key in _SET else before + more
    if isinstance(before, list) and isinstance(more, list):
        return [*before, *more]
    if isinstance(before, Mapping) and isinstance(more, Mapping):
        return {**before, **{name: joined(name, before.get(name), value) for name, value in more.items()}}
    return more
