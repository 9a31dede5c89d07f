"""Traces from an agent's saved checkpoints: the difference of each to the ones before, with ids that never change."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

from ratchet_client.checkpoint_parser import Checkpoint, Task, parse_checkpoints, parse_message
from ratchet_client.decisions import AGENT_PATTERN, MAX_NAME, decision_payload, validate_agent
from ratchet_client.json_values import to_json
from ratchet_client.traces import PART_SIZE
from ratchet_client.transcripts import Transcript

NAMESPACE = UUID("6f5e2b0c-3c1d-5d0e-9b52-6c1f0a7d9e11")
"""Under which ids of checkpoints' traces and decisions are named; changing it would import everything twice."""
MAX_FILE_BYTES = 200_000_000
"""Largest `.json` file read: it must be parsed as a whole. `.jsonl` files may be of any size."""
SHORTEST_OVERLAP = 2
"""Messages in a row that must agree for a window to count as the continuation of an earlier checkpoint."""


@dataclass(frozen=True)
class CheckpointRefused:
    """Part of the files that could not be read, and why."""

    path: str
    line: int | None
    reason: str


@dataclass
class _Session:
    """State of a session so far: its message histories, as fingerprints, and the status of its tasks."""

    histories: list[list[bytes]] = field(default_factory=list)
    tasks: dict[str, str] = field(default_factory=dict)

    def new_from(self, messages: list[bytes]) -> int:
        """Index of the first message that no earlier checkpoint holds at its place; remembers the history.

        A checkpoint may continue an earlier one, repeat a part of it, branch off after a common beginning, or hold a
        window that slid on (its beginning was dropped): a suffix of the earlier history is then its prefix.
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
    """Length of the longest suffix of `earlier` that is a prefix of `later`; 0 below SHORTEST_OVERLAP."""
    for length in range(min(len(earlier), len(later)), SHORTEST_OVERLAP - 1, -1):
        if earlier[-length:] == later[:length]:
            return length
    return 0


class CheckpointLoader:
    """Reads checkpoints from a `.json` or `.jsonl` file, or from every such file under a folder.

    A file holds a checkpoint, a list or lines of them, or a session log of one message a line. Known are message lists
    under the usual names at any depth, tool calls of OpenAI's and Anthropic's kind, and tasks with a status. Files are
    read in the natural order of their names (checkpoint-2 before checkpoint-10). Without a session id of its own a
    checkpoint belongs to the session of its file name without the number at its end.

    `traces()` gives payloads for TraceCollector.add, one for what each checkpoint adds to its session; ids follow from
    the content, so that reading the same files again, or more of them later, sends nothing twice. What cannot be read
    is listed in `refused` and stops nothing. agent: the slug to record under, where a checkpoint names no valid one.

    Raises ValueError for an agent that cannot be, FileNotFoundError for a path that is not there.
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
        """Messages left out because an earlier checkpoint holds them."""

    def traces(self) -> Iterator[dict[str, Any]]:
        """Trace payloads in the order of the checkpoints; may be called more than once."""
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
        stem = re.sub(r"[-_. ]*\d+$", "", inside.stem)
        return "/".join(part for part in (*inside.parts[:-1], stem) if part) or inside.stem

    def _checkpoints(self, file: Path) -> Iterator[tuple[int | None, Checkpoint]]:
        """The checkpoints of a file with the line each begins at; what cannot be read goes to `refused`."""
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
        log: dict[str, tuple[int, list[dict[str, Any]]]] = {}
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

    def _parsed(self, file: Path, data: bytes, line: int | None) -> Any:
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
    ) -> Iterator[dict[str, Any]]:
        # a system prompt may hold the date; it must not make a checkpoint look like another session
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


def _with_decision(step: dict[str, Any], agent: str, session: str) -> dict[str, Any]:
    """A decision step checked and with its id, which the same answer to the same prompt always has."""
    if step["kind"] != "decision":
        return step
    facts = {"messages": step["messages"], "response": step["response"], "run_id": session}
    return {**step, **decision_payload(id=_id([agent, facts]), **facts)}


def _parts(steps: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The steps in pieces that a server takes."""
    part: list[dict[str, Any]] = []
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


def _id(value: Any) -> str:
    return str(uuid5(NAMESPACE, json.dumps(value, sort_keys=True)))


def _fingerprint(message: dict[str, Any]) -> bytes:
    """Of what a message says; not of ids and times that saving it again may change."""
    return hashlib.sha256(json.dumps(parse_message(message), sort_keys=True).encode()).digest()


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
