"""Parser of saved checkpoints: it finds sessions, messages and tasks at any depth of a JSON document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ratchet_client.json_values import sanitize

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
    """A task. Its status is `completed`, `failed` or the checkpoint's own word."""

    name: str
    status: str
    error: Any = None
    result: Any = None


@dataclass(frozen=True)
class Checkpoint:
    """What one checkpoint holds of one session."""

    session: str = ""
    """The app's id of the session; empty if the checkpoint names none."""
    agent: str = ""
    created_at: str | None = None
    messages: list[dict[str, object]] = field(default_factory=list)
    """Messages as the app saved them. `parse_message` reads one."""
    tasks: list[Task] = field(default_factory=list)


def parse_checkpoints(document: object) -> list[Checkpoint]:
    """The checkpoints in a JSON document, one per session; empty if it holds none."""
    checkpoints: dict[str, Checkpoint] = {}
    tasks: list[tuple[str, Task]] = []
    for part in _walk(document, Checkpoint(), MAX_NESTING):
        if isinstance(part, Checkpoint):
            # Two message lists of one session in a document are successive checkpoints.
            key = part.session if part.session not in checkpoints else f"{part.session}\n{len(checkpoints)}"
            checkpoints[key] = part
        else:
            tasks.append(part)
    for session, task in tasks:
        # Tasks without a known session belong to the document's only session, if it has one.
        key = session if session in checkpoints or len(checkpoints) != 1 else next(iter(checkpoints))
        known = checkpoints.get(key, Checkpoint(session))
        checkpoints[key] = replace(known, tasks=[*known.tasks, task])
    return list(checkpoints.values())


def _walk(value: object, context: Checkpoint, depth: int) -> Iterator[Checkpoint | tuple[str, Task]]:
    if depth < 0:
        return
    if isinstance(value, list):
        if messages := parse_messages(value):
            yield replace(context, messages=messages)
        else:
            for item in value:
                if isinstance(item, (dict, list)):
                    yield from _walk(item, context, depth - 1)
        return
    if not isinstance(value, dict):
        return
    context = _context(value, context)
    message_key = next((key for key in _MESSAGE_KEYS if parse_messages(value.get(key))), None)
    if message_key is not None:
        yield replace(context, messages=_with_system(value, parse_messages(value[message_key])))
    for key, item in value.items():
        if key == message_key:
            continue
        if key in _TASK_KEYS and (tasks := list(_tasks(item))):
            yield from ((context.session, task) for task in tasks)
        elif isinstance(item, (dict, list)) and not (message_key is not None and parse_messages(item)):
            yield from _walk(item, context, depth - 1)


def _context(value: dict[str, Any], context: Checkpoint) -> Checkpoint:
    """The context, updated with this level's session, agent and time."""
    holders = [value, *(value[key] for key in _SESSION_HOLDERS if isinstance(value.get(key), dict))]
    named = (holder.get(key) for holder in holders for key in _SESSION_KEYS)
    session = next((str(v) for v in named if isinstance(v, (str, int)) and str(v)), "")
    if not session:
        of_holder = (holder.get("id") for holder in holders[1:])
        session = next((str(v) for v in of_holder if isinstance(v, (str, int)) and str(v)), "")
    own = value.get("id")
    if (
        not session
        and isinstance(own, (str, int))
        and any(parse_messages(value.get(k)) for k in _MESSAGE_KEYS)
    ):
        # An id beside messages names the session, unless it names the checkpoint.
        is_checkpoint = _CHECKPOINT_KEYS & set(value) or re.match(
            r"(?i)(checkpoint|ckpt|cp)[-_ ]?\d*", str(own)
        )
        session = "" if is_checkpoint else str(own)
    agent = value.get("agent") or value.get("agent_id") or value.get("agent_name")
    return replace(
        context,
        session=session or context.session,
        agent=agent if isinstance(agent, str) else context.agent,
        created_at=parse_time(value) or context.created_at,
    )


def _with_system(value: dict[str, object], messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """The messages, preceded by the system prompt that some frameworks save beside them."""
    system = value.get("system") or value.get("system_prompt")
    if not isinstance(system, (str, list)) or not system or messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def parse_time(value: Mapping[str, object]) -> str | None:
    """The time in a mapping as an ISO text. Reads ISO texts (UTC if they have no zone) and Unix times."""
    for time in (value.get(key) for key in _TIME_KEYS):
        if isinstance(time, bool) or not isinstance(time, (str, int, float)):
            continue
        try:
            moment = datetime.fromisoformat(time) if isinstance(time, str) else _from_unix_time(time)
        except (ValueError, OverflowError, OSError):
            continue
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()
    return None


def _from_unix_time(time: float) -> datetime:
    # In seconds this would be after the year 5138, so it is milliseconds.
    return datetime.fromtimestamp(time / 1000 if abs(time) > 1e11 else time, UTC)


# --- Messages ---------------------------------------------------------------------------------------------


def parse_messages(value: object) -> list[dict[str, object]]:
    """The list itself if all its items are messages; otherwise an empty list."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return []
    return list(value) if all(parse_message(item) for item in value) else []


def parse_message(item: Mapping[str, object]) -> dict[str, object] | None:
    """A saved message as a chat message {role, content, ...}; None if the value is no message.

    Reads messages of OpenAI and Anthropic, lines of a session log ({type, message}) and messages of LangChain
    ({type: "human", content} or {type, data}).
    """
    inner = item.get("message") if isinstance(item.get("message"), Mapping) else item.get("data")
    if isinstance(inner, Mapping) and ("content" in inner or "role" in inner) and "role" not in item:
        return parse_message({"type": item.get("type"), **inner})
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
    message: dict[str, object] = {
        "role": role,
        "content": content if isinstance(content, (str, list)) else None,
    }
    for key in ("name", "tool_calls", "tool_call_id", "function_call", "reasoning_content"):
        if item.get(key):
            message[key] = item[key]
    return message


def content_text(content: object) -> str:
    """The text of a message's content: the content itself, or its text blocks joined."""
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


def _tasks(value: object) -> Iterator[Task]:
    """Tasks in one {name, status}, in a list of these, or in a mapping of name to status."""
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


def _task(value: Mapping[str, object]) -> Task | None:
    status = value.get("status", value.get("state"))
    if isinstance(status, bool) or not isinstance(status, str):
        done = value.get("completed", value.get("done"))
        if not isinstance(done, bool):
            return None
        status = "completed" if done else "open"
    name = next((str(value[key]) for key in _NAME_KEYS if isinstance(value.get(key), (str, int))), "task")
    error = value.get("error") or value.get("failure_reason") or value.get("reason")
    result = value.get("result", value.get("output"))
    return Task(sanitize(name), _STATUS.get(status.lower(), sanitize(status)), error, result)
