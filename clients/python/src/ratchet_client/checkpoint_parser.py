"""What a saved checkpoint says: sessions, messages and tasks, wherever its JSON keeps them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ratchet_client.json_values import clean

MAX_NESTING = 6

_SESSION_KEYS = (
    "session_id",
    "sessionId",
    "thread_id",
    "threadId",
    "conversation_id",
    "conversationId",
    "chat_id",
    "run_id",
)
_SESSION_HOLDERS = ("session", "thread", "conversation", "configurable", "session_data")
_MESSAGE_KEYS = ("messages", "history", "chat_history", "conversation", "transcript", "turns", "dialog")
_TASK_KEYS = ("tasks", "task", "task_state", "task_states", "todos", "subtasks", "plan")
_TIME_KEYS = ("timestamp", "created_at", "createdAt", "saved_at", "updated_at", "time", "ts")
_CHECKPOINT_KEYS = {"checkpoint", "checkpoint_id", "parent_id", "parent_checkpoint_id", "step", "version"}
_NAME_KEYS = ("name", "title", "task", "goal", "description", "content", "objective", "id")
_ROLES = {"human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}
_STATUS = {
    **dict.fromkeys(("completed", "complete", "done", "success", "succeeded", "finished", "ok"), "completed"),
    **dict.fromkeys(("failed", "failure", "error", "errored", "aborted"), "failed"),
}


@dataclass(frozen=True)
class Task:
    """A task and how it stands: `completed`, `failed`, or whatever else the checkpoint calls it."""

    name: str
    status: str
    error: Any = None
    result: Any = None


@dataclass(frozen=True)
class Checkpoint:
    """What one checkpoint holds of one session."""

    session: str = ""
    """The app's id of the session; empty where the checkpoint names none."""
    agent: str = ""
    at: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    """As the app saved them, those that are messages at all; `message_of` reads one."""
    tasks: list[Task] = field(default_factory=list)


def checkpoints_in(document: Any) -> list[Checkpoint]:
    """The checkpoints of a JSON document, one per session it names; empty where it holds nothing of the kind."""
    found: dict[str, Checkpoint] = {}
    tasks: list[tuple[str, Task]] = []
    for part in _walk(document, Checkpoint(), MAX_NESTING):
        if isinstance(part, Checkpoint):
            # two lists of one session in one document: successive checkpoints, told apart by their place
            key = part.session if part.session not in found else f"{part.session}\n{len(found)}"
            found[key] = part
        else:
            tasks.append(part)
    for session, task in tasks:
        # tasks stand beside the messages of their session; with one session in the document there is no doubt
        key = session if session in found or len(found) != 1 else next(iter(found))
        known = found.get(key, Checkpoint(session))
        found[key] = replace(known, tasks=[*known.tasks, task])
    return list(found.values())


def _walk(value: Any, context: Checkpoint, depth: int) -> Iterator[Checkpoint | tuple[str, Task]]:
    if depth < 0:
        return
    if isinstance(value, list):
        if messages := messages_in(value):
            yield replace(context, messages=messages)
        else:
            for item in value:
                if isinstance(item, (dict, list)):
                    yield from _walk(item, context, depth - 1)
        return
    if not isinstance(value, dict):
        return
    context = _context(value, context)
    here = next((key for key in _MESSAGE_KEYS if messages_in(value.get(key))), None)
    if here is not None:
        yield replace(context, messages=_with_system(value, messages_in(value[here])))
    for key, item in value.items():
        if key == here:
            continue
        if key in _TASK_KEYS and (tasks := list(_tasks(item))):
            yield from ((context.session, task) for task in tasks)
        elif isinstance(item, (dict, list)) and not (here is not None and messages_in(item)):
            yield from _walk(item, context, depth - 1)


def _context(value: dict[str, Any], context: Checkpoint) -> Checkpoint:
    """The context with what this level says of session, agent and time."""
    holders = [value, *(value[key] for key in _SESSION_HOLDERS if isinstance(value.get(key), dict))]
    named = (holder.get(key) for holder in holders for key in _SESSION_KEYS)
    session = next((str(v) for v in named if isinstance(v, (str, int)) and str(v)), "")
    if not session:
        of_holder = (holder.get("id") for holder in holders[1:])
        session = next((str(v) for v in of_holder if isinstance(v, (str, int)) and str(v)), "")
    own = value.get("id")
    if not session and isinstance(own, (str, int)) and any(messages_in(value.get(k)) for k in _MESSAGE_KEYS):
        # an id beside messages is the session's, unless it is the checkpoint's own
        is_checkpoint = _CHECKPOINT_KEYS & set(value) or re.match(
            r"(?i)(checkpoint|ckpt|cp)[-_ ]?\d*", str(own)
        )
        session = "" if is_checkpoint else str(own)
    agent = value.get("agent") or value.get("agent_id") or value.get("agent_name")
    return replace(
        context,
        session=session or context.session,
        agent=agent if isinstance(agent, str) else context.agent,
        at=time_of(value) or context.at,
    )


def _with_system(value: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the system prompt that some keep beside the messages."""
    system = value.get("system") or value.get("system_prompt")
    if not isinstance(system, (str, list)) or not system or messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def time_of(value: Mapping[str, Any]) -> str | None:
    """The time a mapping states, as an ISO text; read from ISO texts (UTC where no zone is given) and Unix times."""
    for stated in (value.get(key) for key in _TIME_KEYS):
        if isinstance(stated, bool) or not isinstance(stated, (str, int, float)):
            continue
        try:
            moment = datetime.fromisoformat(stated) if isinstance(stated, str) else _since_1970(stated)
        except (ValueError, OverflowError, OSError):
            continue
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()
    return None


def _since_1970(stated: float) -> datetime:
    # later than the year 5138 in seconds: it counts milliseconds
    return datetime.fromtimestamp(stated / 1000 if abs(stated) > 1e11 else stated, UTC)


# --- Messages ---------------------------------------------------------------------------------------------


def messages_in(value: Any) -> list[dict[str, Any]]:
    """The messages of a list that holds nothing else; empty for any other value."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return []
    found = [message_of(item) for item in value]
    return [item for item, read in zip(value, found, strict=True) if read is not None] if all(found) else []


def message_of(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """A saved message as {role, content, ...} in the chat shape, or None for what is no message.

    Reads OpenAI and Anthropic messages, those wrapped in a line of a session log ({type, message}), and LangChain's
    ({type: "human", content} or {type, data}).
    """
    inner = item.get("message") if isinstance(item.get("message"), Mapping) else item.get("data")
    if isinstance(inner, Mapping) and ("content" in inner or "role" in inner) and "role" not in item:
        return message_of({"type": item.get("type"), **inner})
    role = item.get("role", item.get("type"))
    if not isinstance(role, str):
        return None
    role = _ROLES.get(role, role)
    content = item.get("content")
    calls = item.get("tool_calls") or []
    if role not in ("system", "developer", "user", "assistant", "tool"):
        return None
    if not isinstance(content, (str, list)) and not calls and not item.get("function_call"):
        return None
    message: dict[str, Any] = {"role": role, "content": content if isinstance(content, (str, list)) else None}
    for key in ("name", "tool_calls", "tool_call_id", "function_call", "reasoning_content"):
        if item.get(key):
            message[key] = item[key]
    return message


def text_of(content: Any) -> str:
    """The text of a message's content: itself, or that of its text blocks."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    texts = (
        block if isinstance(block, str) else block.get("text")
        for block in blocks
        if isinstance(block, str)
        or (isinstance(block, Mapping) and block.get("type", "text") in _TEXT_BLOCKS)
    )
    return "\n".join(text for text in texts if isinstance(text, str))


_TEXT_BLOCKS = ("text", "output_text", "input_text")


# --- Tasks ------------------------------------------------------------------------------------------------


def _tasks(value: Any) -> Iterator[Task]:
    """Tasks from one {name, status}, a list of them, or a mapping of name to status."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict) and (task := _task(item)):
                yield task
    elif isinstance(value, dict):
        if task := _task(value):
            yield task
        else:
            for name, item in value.items():
                if isinstance(item, dict) and (task := _task({"name": name, **item})):
                    yield task
                elif isinstance(item, str) and item.lower() in _STATUS:
                    yield Task(str(name), _STATUS[item.lower()])


def _task(value: dict[str, Any]) -> Task | None:
    status = value.get("status", value.get("state"))
    if isinstance(status, bool) or not isinstance(status, str):
        done = value.get("completed", value.get("done"))
        if not isinstance(done, bool):
            return None
        status = "completed" if done else "open"
    name = next((str(value[key]) for key in _NAME_KEYS if isinstance(value.get(key), (str, int))), "task")
    error = value.get("error") or value.get("failure_reason") or value.get("reason")
    result = value.get("result", value.get("output"))
    return Task(clean(name), _STATUS.get(status.lower(), clean(status)), error, result)
