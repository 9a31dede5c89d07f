"""Calls of tools in process: which syntax a chat template writes them in, the grammar of a call, and how it is read."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from backend import limits
from rl.agents.template import references_check
from rl.decoding.constraint import (
    Constraint,
    DecodingFailed,
    GrammarVocabulary,
    SchemaRefused,
    lark_grammar,
    refusal_of,
    schema_part,
)
from rl.serving.base import Ask, BackendFailed, BackendUnable, ServingRefused

_NAME = "ratchet_probe"
_CALL = re.compile(rf'\{{\s*"name":\s*"{_NAME}",\s*"(arguments|parameters)":\s*\{{[^{{}}]*\}}\s*\}}')
_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
ELSEWHERE = (
    "add an OpenAI-compatible server to LOCAL_BACKENDS, or take a base model whose template writes tools"
)


@dataclass(frozen=True)
class Tools:
    """The functions that a request offers, and whether one must be called."""

    offered: Sequence[Mapping[str, Any]]
    choice: str = "auto"
    """auto, none, required, or the name of the function to call."""
    parallel: bool = True
    """False: one call at most."""

    @classmethod
    def of(cls, ask: Ask) -> Self | None:
        """The tools of a request; None where it offers none. Raises ServingRefused, BackendUnable."""
        offered = ask.extra.get("tools") or ()
        choice: Any = ask.extra.get("tool_choice") or "auto"
        for number, tool in enumerate(offered):
            if tool.get("type", "function") != "function" or not isinstance(tool.get("function"), Mapping):
                raise _unable(f"tools[{number}]: functions are the only tools in process", "tools")
        if isinstance(choice, Mapping):
            named = choice.get("function")
            choice = named.get("name") if isinstance(named, Mapping) else None
        names = [tool["function"]["name"] for tool in offered]
        if choice not in ("auto", "none", *(("required", *names) if offered else ())):
            expected = f"auto, none, required or one of {', '.join(names)}" if offered else "tools beside it"
            raise ServingRefused(f"tool_choice: expected {expected}", param="tool_choice")
        return cls(offered, choice, ask.extra.get("parallel_tool_calls") is not False) if offered else None

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.offered]

    @property
    def callable(self) -> list[Mapping[str, object]]:
        """The functions that may be called."""
        functions = [tool["function"] for tool in self.offered]
        if self.choice in ("auto", "required"):
            return functions
        return [function for function in functions if function["name"] == self.choice]


@dataclass(frozen=True)
class CallSyntax:
    """How a chat template writes a call: `prefix`, an object of `name` and `key` (the arguments), `suffix`."""

    prefix: str
    key: str
    suffix: str

    @classmethod
    def of_texts(cls, prompt: str, whole: str) -> Self | None:
        """Read off what a template writes: a prompt beside PROBE_TOOL, and the same with its call. None: the template
        writes no tools, or calls in another syntax than JSON."""
        if _NAME not in prompt or not whole.startswith(prompt):
            return None
        text = re.sub(r"^\s*<think>\s*</think>\s*", "", whole[len(prompt) :])
        found = _CALL.search(text)
        if found is None:
            return None
        before, after = text[: found.start()], text[found.end() :]
        # what a call ends with goes to the end of the tag that the prefix opens; the turn's end is a token
        tag = re.search(r"<(\w+)>\s*$", before)
        closing = re.match(rf"\s*</{tag[1]}>", after) if tag else None
        return cls(before, found[1], closing[0] if closing else "")

    def grammar(self, tools: Tools, schema: Mapping[str, object] | None) -> str | None:
        """llguidance's grammar of an answer beside tools; None: anything may be written.

        schema: of the answer in words, where the request asks for one. Raises SchemaRefused.
        """
        must_call = tools.choice not in ("auto", "none")
        calls = "call" if not tools.parallel else "call more*"
        if must_call:
            start = calls
        elif schema is not None:
            start = f"words | {calls}"
        elif self.prefix.strip():
            start = f"TEXT ({calls})?"
        else:
            start = f"TEXT | {calls}"
        if tools.choice == "none":
            start = "words" if schema is not None else "TEXT"
        lines = [f"start: {start}"]
        if "call" in start:
            between = "" if self.prefix.strip() else '"; " '
            lines += [
                f"call: {json.dumps(self.prefix)} body {json.dumps(self.suffix)}"
                if self.suffix
                else f"call: {json.dumps(self.prefix)} body"
                if self.prefix
                else "call: body",
                f'more: {between}("\\n")? call',
                f"body: %json {json.dumps(self._call_schema(tools.callable))}",
            ]
        if "words" in start:
            lines.append(f"words: %json {json.dumps(schema_part(schema or {}))}")
        if "TEXT" in start:
            opening = re.escape(self.prefix.strip()) if self.prefix.strip() else ""
            kept_out = f" & ~/(.|\\n)*{opening.replace('/', chr(92) + '/')}(.|\\n)*/" if opening else ""
            lines.append(f"TEXT: /(.|\\n)*/{kept_out}" if opening else "TEXT: /([^{\\s](.|\\n)*)?/")
        return "\n".join(lines) + "\n"

    def _call_schema(self, functions: Sequence[Mapping[str, object]]) -> object:
        one = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    self.key: _parameters(function),
                },
                "required": ["name", self.key],
                "additionalProperties": False,
            }
            for function in functions
        ]
        return schema_part(one[0] if len(one) == 1 else {"anyOf": one})


def _parameters(function: Mapping[str, object]) -> Mapping[str, object]:
    """The schema of a function's arguments; none is an object without any."""
    found = function.get("parameters")
    if not isinstance(found, Mapping) or not found:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **found}


class CallReader:
    """Splits a text, as it is written, into words that can be shown and calls of tools."""

    def __init__(self, tools: Tools | None, syntax: CallSyntax | None) -> None:
        self._reads = tools is not None and syntax is not None and tools.choice != "none"
        self._names = set(tools.names) if tools else set()
        self._opening = syntax.prefix.strip() if syntax else ""
        self._held = ""
        self._has_begun = False
        """A call has begun: what follows is held to the end."""

    def add(self, text: str) -> str:
        """Words that can be shown now."""
        if not self._reads:
            return text
        self._held += text
        if self._has_begun:
            return ""
        if not self._opening:
            start = self._held.lstrip()
            self._has_begun = start[:1] in ("{", "[")
            if self._has_begun or not start:
                return ""
            shown, self._held = self._held, ""
            return shown
        at = self._held.find(self._opening)
        if at >= 0:
            self._has_begun = True
        else:
            at = len(self._held) - _overlap(self._held, self._opening)
        shown, self._held = self._held[:at], self._held[at:]
        return shown

    def end(self) -> tuple[str, list[dict[str, object]]]:
        """The words that are left, and the calls."""
        calls, words = calls_read(self._held, self._names) if self._has_begun else ([], self._held)
        self._held = ""
        return words, [
            {
                "index": index,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": _as_text(arguments)},
            }
            for index, (name, arguments) in enumerate(calls)
        ]


def calls_read(text: str, names: set[str]) -> tuple[list[tuple[str, object]], str]:
    """The calls in a text, as Hermes and Qwen (`<tool_call>`) or Llama write them, and the words beside them.

    A text that holds what is no call of a known function is words alone.
    """
    found = list(_TAGGED.finditer(text))
    if not found:
        calls = _calls(text.strip().removeprefix("<|python_tag|>"), names)
        return (calls, "") if calls else ([], text)
    calls, words = [], _TAGGED.sub("", text)
    for one in found:
        read = _calls(one[1], names)
        if not read and (one[2] or not calls):
            return [], text
        if not read:
            words += one[0]  # cut within a call: those before it were whole
        calls += read
    return calls, words if words.strip() else ""


def _calls(text: str, names: set[str]) -> list[tuple[str, object]]:
    """The calls that a text is; none where it is anything else."""
    found = list(_objects(text))
    if not all(isinstance(one, dict) and one.get("name") in names for one in found):
        return []
    return [(one["name"], one.get("arguments", one.get("parameters")) or {}) for one in found]


def _objects(text: str) -> Iterator[Any]:
    """The JSON values in a text, one after another, in a list, or separated by semicolons; None for other text."""
    decoder = json.JSONDecoder()
    text = text.strip()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            yield None
            return
        yield from value if isinstance(value, list) else [value]
        text = text[end:].lstrip("; \n\t\r")


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _overlap(text: str, opening: str) -> int:
    """Length of the longest end of a text that an opening begins with."""
    return next((n for n in range(min(len(text), len(opening)), 0, -1) if text.endswith(opening[:n])), 0)


def _unable(message: str, param: str) -> BackendUnable:
    return BackendUnable(f"{message}; {ELSEWHERE}", param=param, code="unsupported")


MAX_SCHEMA = limits.SCHEMA_CHARACTERS
"""Characters of a JSON schema: a grammar grows with it."""


def constraint_of(ask: Ask, vocabulary: GrammarVocabulary) -> Constraint | None:
    """The schema that constrains an answer, else the closed set of answers; None: free text. Raises ServingRefused."""
    with decoding_errors():
        if ask.response_schema is not None:
            schema_size_check(ask.response_schema)
            return Constraint.of_schema(vocabulary, ask.response_schema)
        return Constraint.of_answers(vocabulary, ask.answers) if ask.answers else None


def tools_constraint(
    ask: Ask, tools: Tools, syntax: CallSyntax, vocabulary: GrammarVocabulary
) -> Constraint | None:
    """Constraint of an answer beside tools: words, or calls that fit the schemas. Raises ServingRefused."""
    try:
        for function in tools.callable:
            schema_size_check(function)
            references_check(_parameters(function))
        if ask.response_schema is not None:
            schema_size_check(ask.response_schema)
        grammar = syntax.grammar(tools, ask.response_schema)
        return Constraint(vocabulary, lark_grammar(grammar)) if grammar else None
    except (ValueError, RecursionError) as error:
        raise ServingRefused(f"tools: {error}", param="tools") from error


def schema_size_check(schema: Mapping[str, object]) -> None:
    """Raises SchemaRefused for a schema of more than MAX_SCHEMA characters, or one nested too deeply to be read."""
    try:
        length = len(json.dumps(schema))
    except RecursionError as error:
        raise refusal_of("it is nested too deeply") from error
    if length > MAX_SCHEMA:
        raise SchemaRefused(f"expected a JSON schema of at most {MAX_SCHEMA:,} characters, found {length:,}")


@contextlib.contextmanager
def decoding_errors() -> Iterator[None]:
    """Inside, what goes wrong in constrained decoding is raised as ServingRefused or BackendFailed."""
    try:
        yield
    except SchemaRefused as error:
        raise ServingRefused(str(error), param="response_format") from error
    except DecodingFailed as error:
        raise BackendFailed(str(error)) from error
