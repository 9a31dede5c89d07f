"""Messages as chat templates take them, and as the template writes them: one way to train and serve. Pure.

Training renders through transformers' tokenizer, serving through `ChatTemplate`, which is the same Jinja. Both give
their turns through `prompt_rendered`, so that a served prompt is the trained prompt.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from feedback.messages import ChatMessage
from rl.agents.base import JsonObject
from rl.checksums import TEMPLATE_FILES

DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% else %}{{ 'Assistant:\n' + message['content'] + (eos_token or '') + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
"""For base models that come without one (GPT-2, OPT): plain paragraphs, each answer ended by the eos token."""

TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a template that refuses messages; many concatenate what may be None."""

Turn = Mapping[str, object]


class TemplateRefused(ValueError):
    """A chat template that does not write these messages; the message says why."""


def prompt_rendered(render: Callable[[Sequence[Turn]], str], turns: Sequence[Turn]) -> str:
    """The text that `render` makes of a prompt's turns.

    Where the template refuses a system turn, its words go in front of the next user turn. Raises TemplateRefused.
    """
    try:
        return render(turns)
    except TEMPLATE_ERRORS as error:
        reason, folded = error, system_folded(turns)
    if folded is not None:
        try:
            return render(folded)
        except TEMPLATE_ERRORS as error:
            reason = error
    raise TemplateRefused(
        f"the base model's chat template refuses this prompt ({reason}); roles found: "
        f"{', '.join(str(turn.get('role')) for turn in turns)}"
    ) from reason


def system_folded(turns: Sequence[Turn]) -> list[Turn] | None:
    """The turns with each system turn in front of the next user turn; None where there is none to put it in."""
    found: list[Turn] = []
    words: list[str] = []
    for turn in turns:
        if turn["role"] == "system":
            words.append(str(turn["content"]))
        elif words and turn["role"] == "user":
            found.append({**turn, "content": "\n\n".join([*words, str(turn["content"])])})
            words = []
        else:
            found.append(turn)
    return found if not words and len(found) < len(turns) else None


class ChatTemplate:
    """A template in Jinja, with the settings, filters and functions that transformers gives to it."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """tokens: `bos_token`, `eos_token` and the like, as texts. Raises TemplateRefused for what is no Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        self.source, self.tokens = source, dict(tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TemplateRefused(f"the chat template is no Jinja: {error}") from error

    def render(self, turns: Sequence[Turn], tools: Sequence[object] = (), *, answer: bool = True) -> str:
        """Text of turns, with the beginning of an answer where `answer` is true. Raises TEMPLATE_ERRORS."""
        return self._template.render(
            messages=list(turns),
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=answer,
            **self.tokens,
        )


class _Generation(Extension):
    """`{% generation %}`, with which a template marks an assistant's tokens, writes what is in it."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def template_read(folder: Path) -> str | dict[str, str] | None:
    """The chat template in a folder of a model or an adapter, or several by name; None where there is none.

    Files come before `tokenizer_config.json`, as in transformers, and `chat_template.json` after it.
    """
    plain, older, further = TEMPLATE_FILES
    named = {file.stem: file.read_text("utf-8") for file in sorted(folder.glob(further))}
    if (folder / plain).is_file():
        named["default"] = (folder / plain).read_text("utf-8")
    found: Any = named or _in_json(folder / "tokenizer_config.json") or _in_json(folder / older)
    if isinstance(found, list):
        found = {str(one["name"]): str(one["template"]) for one in found}
    return found["default"] if isinstance(found, dict) and found.keys() == {"default"} else found


def _in_json(file: Path) -> object:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("chat_template") if isinstance(found, dict) else None


# --- Messages as chat templates take them, the same for training and serving. Pure ---

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
