"""Preview of a decision for people: the question, the choice and the other options."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
"""Preview kind -> default keys in `Decision.state` of the question and of the names to choose from."""

SCREENS = ("phone", "tablet", "desktop", "wall-screen")
"""Values of the context's `on` that change the frame of a preview."""

BRIEF = 120
"""Most characters of an answer that fit two columns on a phone."""


@dataclass(frozen=True)
class Turn:
    """One message of the prompt, as text."""

    role: str
    text: str

    @property
    def structure(self) -> Structure | None:
        """Fields of a JSON message, such as an app's state or a tool's answer; None for other texts."""
        return structure_of(self.text)


@dataclass(frozen=True)
class Block:
    """Part of a text: prose, fenced code, or JSON with its structure."""

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
    """One of the names that an agent picks from or ranks."""

    name: str
    description: str
    place: int
    """Rank in the answer, from 1; 0 if not picked."""


@dataclass(frozen=True)
class CallPreview:
    """A tool call; `arguments` is indented JSON."""

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
    """What a preview template shows of a decision. It leaves out the policy, so that raters are blind to it."""

    template: str
    question: str
    facts: list[tuple[str, str]]
    choice: str
    """The chosen name; empty if the response is free text or unreadable."""
    response: list[Block]
    options: list[Option]
    fault: str = ""
    """Why the response is shown as plain text instead of a choice."""
    description: str = ""
    drawing: SafeString | None = None
    screen: str = ""
    tree: list[Folder] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)
    in_order: bool = False
    """True if every name was picked: the order is the answer."""
    call: CallPreview | None = None

    @property
    def chooses(self) -> bool:
        """True if raters correct it by choosing another option, False if they edit the text."""
        return bool(self.options) and not self.template.endswith("/text.html")

    @property
    def brief(self) -> bool:
        """True if the answer is readable in half of a phone's width."""
        if self.choice or self.drawing:
            return True
        return all(not block.code and not block.structure for block in self.response) and (
            sum(len(block.text) for block in self.response) <= BRIEF
        )

    @property
    def other_options(self) -> list[Option]:
        return [option for option in self.options if not option.chosen]


class AgentFacts(Protocol):
    """What pages show of an agent."""

    @property
    def title(self) -> str: ...
    @property
    def suggested_tags(self) -> tuple[str, ...]: ...
    @property
    def preview(self) -> str:
        """Name of a template in `feedback/preview/`; an unknown one is shown as text."""

    @property
    def asked_key(self) -> str:
        """Key in `Decision.state` of the question; empty: the default of the preview."""

    @property
    def listed_key(self) -> str:
        """Key in `Decision.state` of the names to choose from; empty: the default of the preview."""

    @property
    def draw(self) -> Callable[..., str | None] | None:
        """(choice, asked, description, context, seed) -> an SVG element with every text escaped, or None."""


def agent_facts(slug: str) -> AgentFacts:
    """Facts about an agent from FEEDBACK_AGENT_FACTS."""
    facts: AgentFacts = import_string(settings.FEEDBACK_AGENT_FACTS)(slug)
    return facts


def preview_context(decision: Decision) -> dict[str, Any]:
    """Template context of a decision's preview."""
    facts = agent_facts(decision.agent)
    preview = preview_of(decision, facts)
    return {
        "decision": decision,
        "facts": facts,
        "preview": preview,
        "corrections": preview.other_options if preview.chooses else [],
        "picks": [] if preview.chooses else answers_offered(decision),
        "turns": turns_of(decision.messages),
        "conversation": conversation_of(decision.messages),
    }


def answers_offered(decision: Decision) -> list[str]:
    """The agent's other answers that a rater can pick as the correction, where its answers are a few that repeat."""
    closed: Sequence[str] = import_string(settings.FEEDBACK_CLOSED_ANSWERS)(decision.agent)
    return [answer for answer in closed if answer != decision.response.strip()]


@dataclass(frozen=True)
class _Choice:
    """What a response chose."""

    name: str = ""
    names: Sequence[str] = ()
    """Every picked name, in order; for lists alone."""
    call: CallPreview | None = None
    fault: str = ""


def _read_choice(response: str, kind: str) -> _Choice:
    if kind == "list":
        names, fault = _choice_names(response)
        return _Choice(", ".join(names), names, fault=fault)
    if kind == "tool":
        call = _call(response)
        return _Choice(call.tool if call else "", call=call)
    if kind == "text":
        return _Choice()
    name, fault = _choice(response)
    return _Choice(name, fault=fault)


def preview_of(decision: Decision, facts: AgentFacts) -> Preview:
    """Preview of a decision of an agent with these facts."""
    template = _template_name(facts.preview)
    kind = template.removesuffix(".html").rpartition("/")[2]
    state = _mapping(decision.state)
    context = _mapping(state.get("context"))
    default_asked, default_listed = STATE_KEYS.get(kind, ("question", ""))
    listed_key = facts.listed_key or default_listed
    chosen = _read_choice(decision.response, kind)
    choice, fault = chosen.name, chosen.fault
    options = _options(decision, state.get(listed_key), kind)
    if choice and options and kind not in ("list", "tool") and not any(option.chosen for option in options):
        fault = f"{choice} is not among the {len(options)} listed"
    question = _text(state.get(facts.asked_key or default_asked))
    if not question and kind != "text":
        question = _first_line(_last_user(decision.messages))
    description = _text(_mapping(state.get("descriptions")).get(choice))
    screen = str(context.get("on", "")).replace(" ", "-")
    names = list(chosen.names)
    return Preview(
        template=template,
        question=question,
        facts=[(str(name), str(value)) for name, value in context.items()],
        choice=choice,
        response=text_blocks(decision.response),
        options=options,
        fault=fault,
        description=description,
        drawing=_drawing(decision, facts, choice, asked=question, description=description, context=context),
        screen=screen if screen in SCREENS else "",
        picks=_picks(state, listed_key, names) if kind == "list" else [],
        in_order=len(names) > 1 and set(names) == set(_list_values(state, listed_key)),
        call=chosen.call,
        tree=_tree([option.label for option in options] or [choice], choice) if kind == "folder" else [],
    )


def _drawing(decision: Decision, facts: AgentFacts, choice: str, **known: object) -> SafeString | None:
    if not choice or facts.draw is None:
        return None
    try:
        drawing = facts.draw(choice, seed=decision.prompt_hash, **known)
    except Exception:
        # A drawing may be a plugin's code: log its fault and show the page without a picture.
        logger.exception("the drawing of agent %s failed for the choice %.80r", decision.agent, choice)
        return None
    # Drawings escape their texts.
    return None if drawing is None else mark_safe(drawing)  # noqa: S308


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def glimpse_of(decision: Decision) -> tuple[str, str]:
    """The prompt and the response, one line each, for lists."""
    answered = answer_line(decision.response)
    question = _last_user(decision.messages) or next((turn.text for turn in turns_of(decision.messages)), "")
    return _short(_first_line(question)), _short(answered)


def answer_line(response: str) -> str:
    """A response on one line: the chosen names, an object's fields, or the text."""
    if spoken := _spoken(response):
        return " · ".join(line_of(piece) or " ".join(piece.split()) for piece in spoken)
    return ", ".join(_choice_names(response)[0]) or line_of(response) or " ".join(response.split())


def _spoken(response: str) -> list[str]:
    """Texts and tool calls (as JSON {tool: arguments}) of a response of chat messages; [] for any other response."""
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
    """A prompt in three parts: system prompts, folded earlier turns, and the turns shown first."""

    system: list[Turn]
    earlier: list[Turn]
    recent: list[Turn]


RECENT_TURNS = 4
"""Last turns of a conversation that are shown unfolded."""


def conversation_of(messages: object) -> Conversation:
    turns = turns_of(messages)
    spoken = [turn for turn in turns if turn.role != "system"]
    return Conversation(
        system=[turn for turn in turns if turn.role == "system"],
        earlier=spoken[:-RECENT_TURNS],
        recent=spoken[-RECENT_TURNS:],
    )


def turns_of(messages: object) -> list[Turn]:
    """The prompt's messages as texts; images, tool calls and other parts become JSON."""
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
    """A text split at ``` fences. JSON gets its structure; chat messages become their texts and calls."""
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


def _sole_value(response: str) -> tuple[object, str]:
    """(the only value of a JSON object, "") or (None, fault)."""
    try:
        answer = json.loads(response)
    except (ValueError, RecursionError) as error:
        return None, f"not valid JSON: {error}"
    is_sole = isinstance(answer, dict) and len(answer) == 1
    return (next(iter(answer.values())), "") if is_sole else (None, "expected JSON with one name in it")


def _choice(response: str) -> tuple[str, str]:
    """(name chosen by a JSON response, "") or ("", fault)."""
    name, fault = _sole_value(response)
    return (name, "") if isinstance(name, str) else ("", fault or "expected JSON with one name in it")


def _choice_names(response: str) -> tuple[list[str], str]:
    """(names picked by a JSON response, "") or ([], fault)."""
    found, fault = _sole_value(response)
    names = [found] if isinstance(found, str) else found
    if isinstance(names, list) and any(names) and all(isinstance(name, str) for name in names):
        return names, ""
    return [], fault or "expected JSON with a list of names in it"


def _list_values(state: Mapping[str, object], key: str) -> list[str]:
    listed = state.get(key)
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def _picks(state: Mapping[str, object], key: str, picked: list[str]) -> list[Pick]:
    """Picked options in their order, then the others."""
    described = _mapping(state.get("descriptions"))
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


def _options(decision: Decision, listed: object, kind: str) -> list[Option]:
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
    """The same text for responses that differ only in how their JSON is written."""
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


def _content(content: object) -> str:
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


def _pretty(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def _last_user(messages: object) -> str:
    return next((turn.text for turn in reversed(turns_of(messages)) if turn.role == "user"), "")


def _first_line(text: str) -> str:
    """First line of a prompt, without a leading label such as `question:`."""
    line = text.strip().partition("\n")[0]
    return re.sub(r"^[a-z_]{1,20}:\s+", "", line)


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""
