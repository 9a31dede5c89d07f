"""Traces from an agent's saved checkpoints: what each checkpoint adds to the ones before it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from ratchet_client.checkpoint_parser import (
    Checkpoint,
    Task,
    content_text,
    parse_checkpoints,
    parse_message,
    parse_time,
)
from ratchet_client.decisions import AGENT_PATTERN, MAX_NAME, decision_payload, validate_agent
from ratchet_client.json_values import to_json
from ratchet_client.traces import PART_SIZE

NAMESPACE = UUID("6f5e2b0c-3c1d-5d0e-9b52-6c1f0a7d9e11")
"""Namespace of the ids (UUID 5) of traces and decisions. If it changed, files would be imported twice."""
MAX_FILE_BYTES = 200_000_000
"""Largest `.json` file, which is parsed as a whole. A `.jsonl` file may have any size."""
SHORTEST_OVERLAP = 2
"""Fewest equal messages in a row that make a checkpoint the continuation of an earlier one."""


@dataclass(frozen=True)
class CheckpointRefused:
    """A part of a file that could not be read, and the reason."""

    path: str
    line: int | None
    reason: str


@dataclass
class _Session:
    """What earlier checkpoints hold of a session: fingerprints of its messages, statuses of its tasks."""

    histories: list[list[bytes]] = field(default_factory=list)
    tasks: dict[str, str] = field(default_factory=dict)

    def new_from(self, messages: list[bytes]) -> int:
        """Index of the first message that is new in this checkpoint. Stores the checkpoint's history.

        A checkpoint may continue an earlier one, repeat a part of it, or branch off from it. It may also be a window
        whose first messages were dropped: then it begins with the end of the earlier history.
        """
        best, history = max(
            ((_common(earlier, messages), earlier) for earlier in self.histories),
            key=lambda match: match[0],
            default=(0, []),
        )
        if best == len(messages):
            return best
        if best and best == len(history):
            history[:] = messages
        elif not best and (
            overlap := max((_overlap(earlier, messages) for earlier in self.histories), default=0)
        ):
            earlier = next(earlier for earlier in self.histories if _overlap(earlier, messages) == overlap)
            earlier.extend(messages[overlap:])
            return overlap
        else:
            self.histories.append(messages)
        return best

    def tasks_changed(self, tasks: list[Task]) -> list[Task]:
        changed = [task for task in tasks if self.tasks.get(task.name) != task.status]
        self.tasks.update({task.name: task.status for task in changed})
        return changed


def _common(one: list[bytes], other: list[bytes]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _overlap(earlier: list[bytes], later: list[bytes]) -> int:
    """Length of the longest end of `earlier` with which `later` begins; 0 if below SHORTEST_OVERLAP."""
    for length in range(min(len(earlier), len(later)), SHORTEST_OVERLAP - 1, -1):
        if earlier[-length:] == later[:length]:
            return length
    return 0


class CheckpointLoader:
    """Reads checkpoints from a `.json` or `.jsonl` file, or from all such files under a folder.

    A file holds one checkpoint, several as a list or as lines, or a session log with one message a line. The loader
    finds lists of messages at any depth, tool calls as OpenAI and Anthropic write them, and tasks with a status.
    Files are read in the natural order of their names: checkpoint-2 before checkpoint-10. The file name without the
    number at its end names the session of checkpoints that have no session id.

    `traces()` yields payloads for TraceCollector.add. Each holds what a checkpoint adds to its session. Ids follow
    from the content: a file that is read again sends nothing twice. `refused` lists what cannot be read; the rest is
    read. agent: slug for checkpoints that name no valid agent.

    Raises ValueError for an invalid agent, FileNotFoundError if the path does not exist.
    """

    def __init__(self, path: str | Path, agent: str = "assistant") -> None:
        self.path = Path(path)
        self.agent = validate_agent(agent)
        if not self.path.exists():
            raise FileNotFoundError(
                f"expected a checkpoint file or a folder of them, found nothing at {self.path}"
            )
        self.refused: list[CheckpointRefused] = []
        self.overlapping = 0
        """Number of messages left out because an earlier checkpoint holds them."""

    def traces(self) -> Iterator[dict[str, object]]:
        """Trace payloads in the order of the checkpoints. May be called again."""
        self.refused, self.overlapping = [], 0
        sessions: dict[tuple[str, str], _Session] = {}
        for file in self._files():
            fallback = self._session_of(file)
            for line, checkpoint in self._checkpoints(file):
                agent = checkpoint.agent if re.fullmatch(AGENT_PATTERN, checkpoint.agent) else self.agent
                name = checkpoint.session or fallback
                session = sessions.setdefault((agent, name), _Session())
                yield from self._new(agent, name[:MAX_NAME], session, checkpoint, (file, line))

    # --- Files --------------------------------------------------------------------------------------------

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        paths = [
            path for path in self.path.rglob("*") if path.suffix.lower() in (".json", ".jsonl", ".ndjson")
        ]
        return sorted((path for path in paths if path.is_file()), key=lambda path: _natural(path.as_posix()))

    def _session_of(self, file: Path) -> str:
        inside = file.relative_to(self.path) if self.path.is_dir() else Path(file.name)
        stem = inside.stem.rstrip("0123456789")
        stem = stem.rstrip("-_. ") if stem != inside.stem else stem
        return "/".join(part for part in (*inside.parts[:-1], stem) if part) or inside.stem

    def _checkpoints(self, file: Path) -> Iterator[tuple[int | None, Checkpoint]]:
        """Each checkpoint of a file with the line where it begins. What cannot be read goes to `refused`."""
        try:
            if file.suffix.lower() == ".json":
                yield from self._parse_document(file)
            else:
                yield from self._lines(file)
        except OSError as error:
            self._refuse(file, None, f"cannot be read: {error.strerror or error}")

    def _parse_document(self, file: Path) -> Iterator[tuple[int | None, Checkpoint]]:
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            self._refuse(
                file, None, f"expected at most {MAX_FILE_BYTES:,} bytes, found {size:,}; use JSON lines"
            )
            return
        document = self._parsed(file, file.read_bytes(), None)
        if document is None:
            return
        checkpoints = parse_checkpoints(document)
        if not checkpoints:
            self._refuse(file, None, "expected messages or tasks, found neither")
        yield from ((None, checkpoint) for checkpoint in checkpoints)

    def _lines(self, file: Path) -> Iterator[tuple[int | None, Checkpoint]]:
        log: dict[str, tuple[int, list[dict[str, object]]]] = {}
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                document = self._parsed(file, line, number) if line.strip() else None
                if document is None:
                    continue
                if isinstance(document, dict) and parse_message(document) is not None:
                    session = document.get("session_id") or document.get("sessionId") or ""
                    log.setdefault(str(session), (number, []))[1].append(document)
                elif checkpoints := parse_checkpoints(document):
                    yield from ((number, checkpoint) for checkpoint in checkpoints)
                else:
                    self._refuse(
                        file, number, "expected a message, a checkpoint or tasks, found none of them"
                    )
        for session, (number, messages) in log.items():
            yield number, Checkpoint(session=session, messages=messages)

    def _parsed(self, file: Path, data: bytes, line: int | None) -> object:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            at = error.lineno if isinstance(error, json.JSONDecodeError) and line is None else line
            self._refuse(file, at, f"expected JSON, found {error}")
            return None
        if not isinstance(document, (dict, list)):
            self._refuse(file, line, f"expected a JSON object or list, found {type(document).__name__}")
            return None
        return document

    def _refuse(self, file: Path, line: int | None, reason: str) -> None:
        self.refused.append(CheckpointRefused(str(file), line, reason))

    # --- Difference ---------------------------------------------------------------------------------------

    def _new(
        self,
        agent: str,
        name: str,
        session: _Session,
        checkpoint: Checkpoint,
        place: tuple[Path, int | None],
    ) -> Iterator[dict[str, object]]:
        # The system prompt is left out of the comparison: it may hold the date.
        system = next(
            (
                i
                for i, m in enumerate(checkpoint.messages)
                if (parse_message(m) or {}).get("role") != "system"
            ),
            len(checkpoint.messages),
        )
        known = session.new_from([_fingerprint(message) for message in checkpoint.messages[system:]])
        self.overlapping += known
        steps = []
        for step in Transcript(checkpoint.messages, system + known).steps():
            try:
                steps.append(_with_decision(step, agent, name))
            except ValueError as error:
                self._refuse(*place, f"a decision was left out: {error}")
                steps.append({"kind": "step", "name": "assistant", "text": to_json(step["response"])})
        for task in session.tasks_changed(checkpoint.tasks):
            results = {"error": task.error, "result": task.result}
            more = {key: to_json(value) for key, value in results.items() if value is not None}
            steps.append({"kind": "task", "name": task.name[:MAX_NAME], "status": task.status, **more})
        for number, step in enumerate(steps):
            step |= {"n": number, "parent": None}
        for part in _parts(steps):
            times = [step["at"] for step in part if "at" in step] or (
                [checkpoint.created_at] if checkpoint.created_at else []
            )
            body = {
                "agent": agent,
                "run_id": name,
                "started_at": times[0] if times else None,
                "finished_at": times[-1] if times else None,
                "steps": part,
                "metadata": {"source": "checkpoint"},
            }
            yield {"id": _id(body), **body}


def _with_decision(step: dict[str, Any], agent: str, session: str) -> dict[str, object]:
    """A valid decision step with an id that follows from its prompt and answer."""
    if step["kind"] != "decision":
        return step
    facts = {"messages": step["messages"], "response": step["response"], "run_id": session}
    return {**step, **decision_payload(id=_id([agent, facts]), **facts)}


def _parts(steps: list[dict[str, object]]) -> Iterator[list[dict[str, object]]]:
    """The steps in parts of at most PART_SIZE characters, as a server accepts them."""
    part: list[dict[str, object]] = []
    size = 0
    for step in steps:
        length = len(json.dumps(step))
        if part and size + length > PART_SIZE:
            yield part
            part, size = [], 0
        part.append(step)
        size += length
    if part:
        yield part


def _id(value: object) -> str:
    return str(uuid5(NAMESPACE, json.dumps(value, sort_keys=True)))


def _fingerprint(message: Mapping[str, object]) -> bytes:
    """Fingerprint of a message's content, without ids and times, which change when it is saved again."""
    return hashlib.sha256(json.dumps(parse_message(message), sort_keys=True).encode()).digest()


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: object


class ToolResult(NamedTuple):
    call_id: str
    content: object
    failed: bool


class Transcript:
    """Messages of one checkpoint. Those before index `start` are in earlier checkpoints."""

    def __init__(self, messages: list[dict[str, object]], start: int) -> None:
        self.saved, self.start = messages, start
        self.messages = [parse_message(item) or {"role": "user", "content": ""} for item in messages]
        self._calls = [list(_calls(message)) for message in self.messages]
        self._results = [list(_results(message)) for message in self.messages]
        self._call_of = {call.id: call for calls in self._calls for call in calls if call.id}
        self._result_of = {
            result.call_id: result for results in self._results for result in results if result.call_id
        }
        self._known = {call.id for calls in self._calls[:start] for call in calls if call.id}

    def steps(self) -> Iterator[dict[str, object]]:
        """The steps of the new messages, in order. A decision step holds its full prompt and has no id yet."""
        for index in range(self.start, len(self.messages)):
            at = parse_time(self.saved[index])
            for step in self._steps_of(index):
                yield {**step, **({"at": at} if at else {})}

    def _steps_of(self, index: int) -> Iterator[dict[str, object]]:
        message = self.messages[index]
        text = content_text(message["content"])
        if message["role"] == "assistant":
            for thought in _thoughts(message):
                yield {"kind": "reasoning", "name": "", "text": to_json(thought)}
            if text and self._answers(index):
                prompt = [_prompt_message(earlier) for earlier in self.messages[:index]]
                yield {"kind": "decision", "name": "", "messages": prompt, "response": text}
            elif text:
                yield {"kind": "step", "name": "assistant", "text": to_json(text)}
            for call in self._calls[index]:
                yield _call_step(call, self._result_of.get(call.id))
            return
        for result in self._results[index]:
            source = self._call_of.get(result.call_id)
            if source is None or source.id in self._known:
                # The call is in an earlier checkpoint, which had no result for it.
                name = str(message.get("name") or "tool")
                yield _call_step(source or ToolCall(result.call_id, name, None), result)
        if text and message["role"] != "tool":
            yield {"kind": "step", "name": message["role"], "text": to_json(text)}

    def _answers(self, index: int) -> bool:
        """True if an assistant's text answers the prompt; False for a remark before a tool call."""
        if self._calls[index] or not any(m["role"] != "system" for m in self.messages[:index]):
            return False
        following = self.messages[index + 1 :][:1]
        return not following or (following[0]["role"] == "user" and not self._results[index + 1])


def _prompt_message(message: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def _blocks(message: Mapping[str, object], *types: str) -> Iterator[Mapping[str, object]]:
    content = message["content"]
    for block in content if isinstance(content, list) else []:
        if isinstance(block, Mapping) and block.get("type") in types:
            yield block


def _thoughts(message: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(message.get("reasoning_content"), str):
        yield message["reasoning_content"]
    for block in _blocks(message, *_THOUGHTS):
        thought = block.get("thinking") or block.get("text") or block.get("reasoning")
        if isinstance(thought, str):
            yield thought


def _calls(message: Mapping[str, object]) -> Iterator[ToolCall]:
    """Tool calls: `tool_calls` and `function_call` of OpenAI, LangChain's calls, `tool_use` blocks of Anthropic."""
    listed = message.get("tool_calls")
    for item in [*(listed if isinstance(listed, list) else []), {"function": message.get("function_call")}]:
        if not isinstance(item, Mapping):
            continue
        function = item.get("function") if isinstance(item.get("function"), Mapping) else item
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name, str):
            arguments = function.get("arguments", function.get("args"))
            yield ToolCall(str(item.get("id") or name), name, _parsed(arguments))
    for block in _blocks(message, "tool_use", "server_tool_use"):
        yield ToolCall(str(block.get("id") or ""), str(block.get("name") or "tool"), block.get("input"))


def _results(message: Mapping[str, object]) -> Iterator[ToolResult]:
    """Tool results: messages of role `tool` or `function`, `tool_result` blocks of Anthropic."""
    if message["role"] == "tool":
        key = message.get("tool_call_id") or message.get("name") or ""
        yield ToolResult(str(key), content_text(message["content"]) or message["content"], False)
    for block in _blocks(message, "tool_result"):
        content = block.get("content")
        yield ToolResult(
            str(block.get("tool_use_id") or ""),
            content_text(content) or content,
            block.get("is_error") is True,
        )


def _parsed(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments  # A model may write arguments that are no JSON: they stay a text.


def _call_step(call: ToolCall, result: ToolResult | None) -> dict[str, object]:
    step: Mapping[str, object] = {
        "kind": "tool_call",
        "name": call.name,
        "arguments": to_json(call.arguments),
    }
    if result is None:
        return {**step, "unfinished": True}
    return {**step, ("error" if result.failed else "result"): to_json(result.content)}
