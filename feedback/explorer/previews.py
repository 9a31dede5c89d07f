"""Preview of a decision as a person sees it: the question, the choice, and the other options."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from django.conf import settings
from django.template.loader import select_template
from django.utils.module_loading import import_string
from django.utils.safestring import SafeString, mark_safe

from feedback.explorer.structure import Structure, line_of, structure_of
from feedback.messages import ChatMessage, message_read, messages_read
from feedback.models import Decision

logger = logging.getLogger("feedback.explorer.previews")

STATE_KEYS: dict[str, tuple[str, str]] = {
    "widget": ("question", "widgets"),
    "fixture": ("scenario", "fixtures"),
    "folder": ("document", "folders"),
}
"""Preview -> the usual keys of a decision's state that hold what was asked and the names to choose from."""

SCREENS = ("phone", "tablet", "desktop", "wall-screen")
"""Screens that a frame is drawn for."""


BRIEF = 120
"""Characters of an answer that two columns on a phone have room for."""


@dataclass(frozen=True)
class Turn:
    """One message of the prompt."""

    role: str
    text: str

    @property
    def structure(self) -> Structure | None:
        """Of a message that is JSON: an app's state, a tool's answer."""
        return structure_of(self.text)


@dataclass(frozen=True)
class Block:
    """A stretch of a text: words, code between fences, or JSON with its structure."""

    text: str
    code: bool = False
    structure: Structure | None = None


@dataclass(frozen=True)
class Option:
    """One of the listed responses."""

    label: str
    response: str
    chosen: bool


@dataclass(frozen=True)
class Pick:
    """One of the names shown to an agent that picks some or puts all in order."""

    name: str
    description: str
    place: int
    """Rank in the answer, from 1; 0: not picked."""


@dataclass(frozen=True)
class CallPreview:
    """A tool call, as JSON to be read."""

    tool: str
    arguments: str


@dataclass(frozen=True)
class Folder:
    """One line of a folder tree."""

    name: str
    depth: int
    chosen: bool


@dataclass(frozen=True)
class Preview:
    """Everything a preview template shows of a decision. Says nothing of the policy: raters are blind to it."""

    template: str
    question: str
    facts: list[tuple[str, str]]
    choice: str
    """The name chosen, empty where the response is free text or cannot be read."""
    response: list[Block]
    options: list[Option]
    fault: str = ""
    """Reason why the response cannot be shown as a choice; it is then shown as it is."""
    description: str = ""
    drawing: SafeString | None = None
    screen: str = ""
    tree: list[Folder] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)
    in_order: bool = False
    """True if every name was picked: then their order is the answer."""
    call: CallPreview | None = None

    @property
    def chooses(self) -> bool:
        """True if a correction is another of the listed responses; free text is corrected by editing it."""
        return bool(self.options) and not self.template.endswith("/text.html")

    @property
    def brief(self) -> bool:
        """True where the answer can be read on half of a phone's width."""
        if self.choice or self.drawing:
            return True
        return all(not block.code and not block.structure for block in self.response) and (
            sum(len(block.text) for block in self.response) <= BRIEF
        )

    @property
    def other_options(self) -> list[Option]:
        return [option for option in self.options if not option.chosen]


def agent_facts(slug: str) -> Any:
    """Title, description, suggested tags and preview of an agent, asked of FEEDBACK_AGENT_FACTS."""
    return _facts_source(settings.FEEDBACK_AGENT_FACTS)(slug)


def corrections_offered(decision: Decision, preview: Preview) -> list[Option]:
    """Responses that a correction is picked from: the others listed, or the others of a closed set; else none."""
    if preview.chooses:
        return preview.other_options
    closed = _facts_source(settings.FEEDBACK_CLOSED_ANSWERS)(decision.agent)
    if not closed:
        return []
    return [Option(answer, answer, False) for answer in closed if answer != decision.response.strip()]


@cache
def _facts_source(path: str) -> Any:
    return import_string(path)


def preview_of(
    decision: Decision,
    kind: str,
    keys: tuple[str, str] = ("", ""),
    draw: Callable[..., str | None] | None = None,
) -> Preview:
    """Preview of a decision; `kind` is the agent's preview, and one without a template is shown as text.

    keys: the state's keys of what was asked and of the names shown; empty: those that are usual for the kind.
    draw: the agent's drawing of a choice: (choice, asked, description, context, seed) -> an SVG element or None.
    """
    template = _template_name(kind)
    kind = template.removesuffix(".html").rpartition("/")[2]
    state = decision.state if isinstance(decision.state, Mapping) else {}
    usual = STATE_KEYS.get(kind, ("question", ""))
    asked_key, listed_key = keys[0] or usual[0], keys[1] or usual[1]
    context = state.get("context")
    context = context if isinstance(context, Mapping) else {}
    names: list[str] = []
    call = _call(decision.response) if kind == "tool" else None
    if kind == "list":
        names, fault = _choice_names(decision.response)
        choice = ", ".join(names)
    elif call:
        choice, fault = call.tool, ""
    else:
        choice, fault = ("", "") if kind in ("text", "tool") else _choice(decision.response)
    options = _options(decision, state.get(listed_key), kind)
    if choice and options and kind not in ("list", "tool") and not any(option.chosen for option in options):
        fault = f"{choice} is not among the {len(options)} listed"
    question = _text(state.get(asked_key)) or (
        "" if kind == "text" else _first_line(_last_user(decision.messages))
    )
    descriptions = state.get("descriptions")
    description = _text(descriptions.get(choice)) if isinstance(descriptions, Mapping) else ""
    drawing = None
    if choice and draw is not None:
        try:
            drawing = draw(
                choice, asked=question, description=description, context=context, seed=decision.prompt_hash
            )
        except Exception:
            # an agent's drawing may be somebody else's code, and a page of decisions goes on without a picture
            logger.exception("the drawing of agent %s failed for the choice %.80r", decision.agent, choice)
    return Preview(
        template=template,
        question=question,
        facts=[(str(name), str(value)) for name, value in context.items()],
        choice=choice,
        response=text_blocks(decision.response),
        options=options,
        fault=fault,
        description=description,
        # an agent escapes every text of its drawing
        drawing=None if drawing is None else mark_safe(drawing),  # noqa: S308
        screen=screen if (screen := str(context.get("on", "")).replace(" ", "-")) in SCREENS else "",
        picks=_picks(state, listed_key, names) if kind == "list" else [],
        in_order=kind == "list" and len(names) > 1 and set(names) == set(_list_values(state, listed_key)),
        call=call,
        tree=_tree([option.label for option in options] or [choice], choice) if kind == "folder" else [],
    )


def glimpse_of(decision: Decision) -> tuple[str, str]:
    """Prompt and response of a decision on a line each, for a list of many."""
    answered = answer_line(decision.response)
    question = _last_user(decision.messages) or next((turn.text for turn in turns_of(decision.messages)), "")
    return _short(_first_line(question)), _short(answered)


def answer_line(response: str) -> str:
    """A response on one line: the names it chose, the fields of an object, else its words."""
    if spoken := _spoken(response):
        return " · ".join(line_of(piece) or " ".join(piece.split()) for piece in spoken)
    return ", ".join(_choice_names(response)[0]) or line_of(response) or " ".join(response.split())


def _spoken(response: str) -> list[str]:
    """What a response of chat messages says: words, and calls as JSON of {tool: arguments}; [] of any other text."""
    if not response.startswith("[{") or '"role"' not in response[:200]:
        return []
    try:
        messages = messages_read(json.loads(response))
    except (ValueError, RecursionError):
        return []
    return [piece for message in messages for piece in [message.text, *_calls(message)] if piece.strip()]


def _calls(message: ChatMessage) -> list[str]:
    return [
        json.dumps({call.function.name: call.function.parsed}, ensure_ascii=False)
        for call in message.tool_calls
    ]


def _short(text: str, characters: int = 240) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "…"


@dataclass(frozen=True)
class Conversation:
    """A prompt, parted into what is folded away and what a rater reads first."""

    system: list[Turn]
    earlier: list[Turn]
    recent: list[Turn]


RECENT_TURNS = 4
"""Turns of a conversation shown unfolded: what was asked last, and what led to it."""


def conversation_of(messages: Any) -> Conversation:
    """The prompt's messages, with system prompts and all but the last turns set apart."""
    turns = turns_of(messages)
    spoken = [turn for turn in turns if turn.role != "system"]
    return Conversation(
        system=[turn for turn in turns if turn.role == "system"],
        earlier=spoken[:-RECENT_TURNS],
        recent=spoken[-RECENT_TURNS:],
    )


def turns_of(messages: Any) -> list[Turn]:
    """The prompt's messages as texts; parts that are no text (images, tool calls) are shown as JSON."""
    turns = []
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, Mapping):
            continue
        text = _content(message.get("content"))
        if message.get("tool_calls"):
            try:
                calls = _calls(message_read(message))
            except ValueError:
                calls = [_pretty(message["tool_calls"])]
            text = "\n".join([text, *calls]).strip()
        turns.append(Turn(str(message.get("role", "")), text))
    return turns


def text_blocks(text: str) -> list[Block]:
    """A text split at ``` fences; what is a JSON object or list has its structure. Of chat messages, their words and
    their calls."""
    if spoken := _spoken(text):
        return [Block(piece, structure=structure_of(piece)) for piece in spoken]
    if whole := structure_of(text):
        return [Block(text, structure=whole)]
    pieces = re.split(r"```[\w+-]*\n?(.*?)(?:```|\Z)", text, flags=re.DOTALL)
    return [
        Block(piece.strip("\n"), index % 2 == 1, structure_of(piece) if index % 2 else None)
        for index, piece in enumerate(pieces)
        if piece.strip() or len(pieces) == 1
    ]


def _template_name(kind: str) -> str:
    names = ["feedback/preview/text.html"]
    if re.fullmatch(r"[a-z0-9][a-z0-9_-]*", kind):
        names.insert(0, f"feedback/preview/{kind}.html")
    return str(select_template(names).template.name)


def _choice(response: str) -> tuple[str, str]:
    """The one name a JSON response chose, or an empty name and what is wrong with it."""
    try:
        answer = json.loads(response)
    except (ValueError, RecursionError) as error:
        return "", f"not valid JSON: {error}"
    if not isinstance(answer, dict) or len(answer) != 1 or not isinstance(next(iter(answer.values())), str):
        return "", "expected JSON with one name in it"
    return next(iter(answer.values())), ""


def _choice_names(response: str) -> tuple[list[str], str]:
    """The names a JSON response picked: one, or a list of them."""
    name, fault = _choice(response)
    if name:
        return [name], ""
    try:
        answer = json.loads(response)
        (names,) = answer.values()
    except (ValueError, RecursionError, AttributeError):
        return [], fault
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return names, ""
    return [], "expected JSON with a list of names in it"


def _list_values(state: Mapping[str, Any], key: str) -> list[str]:
    listed = state.get(key)
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def _picks(state: Mapping[str, Any], key: str, picked: list[str]) -> list[Pick]:
    """Options that were picked, in their order, then those that were not."""
    described = state.get("descriptions")
    described = described if isinstance(described, Mapping) else {}
    listed = _list_values(state, key)
    rest = [name for name in listed if name not in picked]
    return [
        Pick(name, _text(described.get(name)), picked.index(name) + 1 if name in picked else 0)
        for name in [*dict.fromkeys(picked), *rest]
    ]


def _call(response: str) -> CallPreview | None:
    try:
        call = json.loads(response)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("tool"), str):
        return None
    return CallPreview(call["tool"], _pretty(call.get("arguments") or {}))


def _options(decision: Decision, listed: Any, kind: str) -> list[Option]:
    responses = [
        candidate if isinstance(candidate, str) else candidate.get("response", "")
        for candidate in decision.candidates or []
        if isinstance(candidate, (str, Mapping))
    ]
    if not responses and isinstance(listed, Sequence) and not isinstance(listed, str):
        responses = [json.dumps({kind: name}, ensure_ascii=False) for name in listed if isinstance(name, str)]
    chosen = _canonical_json(decision.response)
    return [
        Option(_label(response, kind), response, _canonical_json(response) == chosen)
        for response in responses
        if response
    ]


def _label(response: str, kind: str) -> str:
    if kind == "list":
        return ", ".join(_choice_names(response)[0]) or response
    return _choice(response)[0] or line_of(response) or response


def _canonical_json(response: str) -> str:
    """Responses that differ only in how their JSON is written choose the same."""
    return _choice(response)[0] or response


def _tree(paths: list[str], chosen: str) -> list[Folder]:
    lines: list[Folder] = []
    seen: set[str] = set()
    for path in sorted({*paths, chosen} - {""}):
        parts = path.split("/")
        for depth in range(len(parts)):
            here = "/".join(parts[: depth + 1])
            if here not in seen:
                seen.add(here)
                lines.append(Folder(parts[depth], depth, here == chosen))
    return lines


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(
            part["text"] if isinstance(part, Mapping) and isinstance(part.get("text"), str) else _pretty(part)
            for part in content
        )
    return _pretty(content)


def _pretty(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def _last_user(messages: Any) -> str:
    return next((turn.text for turn in reversed(turns_of(messages)) if turn.role == "user"), "")


def _first_line(text: str) -> str:
    """The first line of a prompt, without a name in front such as `question:`."""
    line = text.strip().partition("\n")[0]
    return re.sub(r"^[a-z_]{1,20}:\s+", "", line)


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""
