"""Messages as chat templates take them, the same for training and serving. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from feedback.messages import ChatMessage
from rl.agents.base import JsonObject

PROBE_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "ratchet_probe",
        "description": "Ratchet probes",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "any"}}},
    },
}
PROBE_ARGUMENTS = {"word": "ratchet_word"}
_ASKS = {"role": "user", "content": "Ratchet asks"}


class CallForm(NamedTuple):
    """How a template takes tool calls. Most take "" and an object; some (DeepSeek V3) need None and JSON text."""

    content: str | None = ""
    """Content of a turn that only calls."""
    as_object: bool = True
    """True: arguments are an object; False: JSON text."""


def probe_turns(form: CallForm) -> list[JsonObject]:
    """A question, and an answer that calls PROBE_TOOL."""
    arguments = PROBE_ARGUMENTS if form.as_object else json.dumps(PROBE_ARGUMENTS)
    function = {"name": "ratchet_probe", "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return [_ASKS, {"role": "assistant", "content": form.content, "tool_calls": [call]}]


def call_form(write: Callable[[Sequence[JsonObject], Sequence[JsonObject]], str]) -> CallForm:
    """The form in which a template takes calls. write(turns, tools): the rendered text, empty if refused."""
    for form in (CallForm(), CallForm(None), CallForm(as_object=False), CallForm(None, as_object=False)):
        turns = probe_turns(form)
        if "ratchet_word" in (write(turns, [PROBE_TOOL]) or write(turns, [])):
            return form
    return CallForm()


def template_turns(messages: Sequence[ChatMessage], form: CallForm) -> list[JsonObject]:
    """Messages as a template takes them: text, calls with their arguments, no reasoning."""
    turns, ids = [], dict[str | None, str]()
    for message in messages:
        turn: JsonObject = {"role": message.role, "content": message.text}
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                # nine letters and digits, as Mistral's templates require; ids have no other meaning
                ids[call.id] = f"call{len(ids):05d}"
                arguments = call.function.parsed
                if not form.as_object and not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                function = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": ids[call.id], "type": "function", "function": function})
            turn |= {"content": message.text or form.content, "tool_calls": calls}
        if message.role == "tool":
            known = ids.get(message.tool_call_id) or next(reversed(ids.values()), "call00000")
            turn |= {"tool_call_id": known}
        if message.name:
            turn["name"] = message.name
        turns.append(turn)
    return turns
