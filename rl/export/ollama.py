"""Models of an Ollama server from GGUF files: upload, create, alias; chat templates in Go."""

from __future__ import annotations

import datetime
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import httpx
import ollama
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rl.export.artifact import ExportRefused, Progress, sha256_file, silent
from rl.export.gguf import export_gguf

UPLOADS = 3
"""Attempts to send a file: a connection may break within gigabytes."""

TIMEOUT = httpx.Timeout(600.0, connect=5.0)
"""In seconds. Creating a model reads and hashes all of it."""

CONTEXT = 4096
"""Context length in tokens; at most the model's own."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*(:[A-Za-z0-9_][A-Za-z0-9._-]*)?")


@dataclass(frozen=True)
class OllamaModel:
    """A model on an Ollama server."""

    name: str
    host: str
    digests: dict[str, str] = field(default_factory=dict)
    """File name -> `sha256:<hex>`."""
    uploaded: int = 0
    """Number of files sent; the others were there."""
    template: str = ""
    """Its Go template; empty: Ollama's own for the file."""
    system: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    alias: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Gguf:
    """Header facts of a GGUF file."""

    context: int
    bos: str
    stop: list[str]
    bos_added: bool
    jinja: str


class _Client(ollama.Client):
    """The official client, plus a check whether the server has a file."""

    @property
    def address(self) -> str:
        return str(self._client.base_url).rstrip("/")

    def blob_exists(self, digest: str) -> bool:
        return self._client.head(f"/api/blobs/{digest}").status_code == 200


def export_to_ollama(
    model: Path | str,
    name: str | None = None,
    *,
    adapter: Path | None = None,
    host: str | None = None,
    system: str | None = None,
    template: str | None = None,
    parameters: Mapping[str, object] | None = None,
    alias: str | None = None,
    progress: Progress | None = None,
) -> OllamaModel:
    """Makes a GGUF file a model of an Ollama server, with chat template and stop tokens.

    model: a GGUF file; a checkpoint folder, which is first written as GGUF (q4_k_m, on its own base); or the name of a
    model on the server, for an adapter on it. adapter: a GGUF LoRA, for servers that load them. name: `<name>` or
    `<name>:<tag>` on the server; None uses the folder's or file's name. host: the server's address; None uses the
    client's (OLLAMA_HOST, else http://localhost:11434). template: in Go, instead of the translated one. parameters:
    Ollama's (`temperature`, `num_ctx` ...). alias: a second name that will point to this model. Raises ExportRefused
    without a server, for a refused file, and if the created model differs from the order.
    """
    progress = progress or silent
    if isinstance(model, str) and (
        model.endswith(".gguf") or (Path(model) / "adapter_config.json").is_file()
    ):
        model = Path(model)
    name = name or (model.name if isinstance(model, Path) and model.is_dir() else Path(model).stem)
    if isinstance(model, Path) and model.is_dir():
        with tempfile.TemporaryDirectory(prefix="ratchet-ollama-") as folder:
            file = export_gguf(None, model, Path(folder), model_name=name, progress=progress).files[0].path
            return export_to_ollama(
                file,
                name,
                adapter=adapter,
                host=host,
                system=system,
                template=template,
                parameters=parameters,
                alias=alias,
                progress=progress,
            )
    for wanted in (name, *([alias] if alias else [])):
        if not _NAME.fullmatch(wanted):
            raise ExportRefused(
                f"expected a name such as widgets-v312 or widgets:v312, found {wanted!r}; name another"
            )
    facts = _facts(model) if isinstance(model, Path) else None
    go, notes = (None, []) if facts is None or template else _template(facts)
    system = system or (go.system if go is not None else None)
    with _server(host) as client:
        profile = {"num_ctx": min(facts.context, CONTEXT)} if facts else {}
        stop = list(dict.fromkeys([*(facts.stop if facts else []), *(go.stop if go else [])]))
        wanted_parameters = {**profile, **({"stop": stop} if stop else {}), **(parameters or {})}
        files = [path for path in (model, adapter) if isinstance(path, Path)]
        digests, byte_count = {}, 0
        for path in files:
            digests[path.name], new = _upload(client, path, progress)
            byte_count += new
        text = template or (go.text if go is not None else None)
        _create(
            client,
            progress,
            model=name,
            from_=model if isinstance(model, str) else None,
            files={model.name: digests[model.name]} if isinstance(model, Path) else None,
            adapters={adapter.name: digests[adapter.name]} if adapter is not None else None,
            template=text,
            system=system or None,
            parameters=wanted_parameters or None,
        )
        shown = client.show(name)
        if text is not None and (shown.template or "").strip() != text.strip():
            raise ExportRefused(
                f"expected {name} in Ollama with the template it was given, found another ({shown.template!r}); "
                "look at it with: ollama show --template"
            )
        if alias:
            _promote(client, name, alias)
        return OllamaModel(
            name,
            client.address,
            digests,
            byte_count,
            text or "",
            system or "",
            wanted_parameters,
            alias or "",
            notes,
        )


def modelfile(base: Path | str, base_file: Path, adapter: str, jinja: str) -> str:
    """A Modelfile of an adapter on the file it was trained on, with the chat template of its training.

    base: the value of FROM, a file or a model on the server. base_file: that file, whose header is read. jinja: the
    template; empty: the file's own. If it cannot be translated, Ollama uses its own for the base.
    """
    facts = _facts(base_file)
    facts = replace(facts, jinja=jinja or facts.jinja)
    go, _ = _template(facts)
    lines = [f"FROM {base}", f"ADAPTER ./{adapter}"]
    if go is not None:
        lines.append(f'TEMPLATE """{go.text}"""')
        if go.system:
            lines.append(f'SYSTEM """{go.system}"""')
    stop = dict.fromkeys([*facts.stop, *(go.stop if go else [])])
    lines += [f"PARAMETER stop {json.dumps(text)}" for text in stop]
    return "\n".join(lines) + "\n"


@contextmanager
def _server(host: str | None) -> Iterator[_Client]:
    """A client of a responding server; errors in the block become ExportRefused."""
    client = _Client(host or None, timeout=TIMEOUT)
    try:
        with client:
            client.list()
            yield client
    except (ConnectionError, httpx.TransportError) as error:
        raise ExportRefused(
            f"expected an Ollama server at {client.address}, found none that answers "
            f"({error or type(error).__name__}); start it with `ollama serve`, or set OLLAMA_HOST to its address"
        ) from error
    except ollama.ResponseError as error:
        hint = (
            "; export the policy whole, with --format gguf, and register that"
            if "adapter" in error.error.lower()
            else ""
        )
        raise ExportRefused(f"Ollama at {client.address} refused: {error}{hint}") from error


def _upload(client: _Client, path: Path, progress: Progress) -> tuple[str, bool]:
    """Sends a file unless the server has it. Returns its digest, and whether it was sent."""
    size = path.stat().st_size
    digest = f"sha256:{sha256_file(path)}"
    if client.blob_exists(digest):
        return digest, False
    for attempt in range(1, UPLOADS + 1):
        progress(f"uploading {path.name}", 0, size)
        try:
            sent = client.create_blob(path)
        except (httpx.TransportError, ollama.ResponseError) as error:
            final = isinstance(error, ollama.ResponseError) and error.status_code < 500
            if final or attempt == UPLOADS:
                raise
            continue
        if sent != digest:
            raise ExportRefused(
                f"expected {path} to stay as it is while it is uploaded, found it changed; try again"
            )
        progress(f"uploading {path.name}", size, size)
        return digest, True
    raise AssertionError("the last attempt returns or raises")


def _create(client: _Client, progress: Progress, **order: object) -> None:
    status = ""
    create: Callable[..., Iterator[Any]] = client.create
    for update in create(**order, stream=True):
        status = update.status or ""
        progress(f"ollama: {status}", update.completed or 0, update.total or 0)
    if status != "success":
        raise ExportRefused(
            f"expected Ollama to end with success, found it stopped at {status or 'nothing'!r}; look at its log, and "
            "register again: what was uploaded stays"
        )


def _promote(client: _Client, name: str, alias: str) -> None:
    """Makes `alias` another name of `name`; the next request for the alias gets the new model, and no bytes move."""
    if client.copy(name, alias).status != "success":
        raise ExportRefused(
            f"expected Ollama to copy {name} to {alias}, found that it did not; look at its log"
        )


def _template(facts: Gguf) -> tuple[GoTemplate | None, list[str]]:
    if not facts.jinja:
        return None, ["the file has no chat template: Ollama passes the prompt on as it is"]
    go = template_translated(
        facts.jinja, facts.bos, facts.stop[0] if facts.stop else "", bos_added=facts.bos_added
    )
    if go is None:
        return None, [
            "the chat template cannot be translated to Ollama's: it takes the one it knows for the file's own; "
            "compare an answer, or bring a template in Go"
        ]
    return go, []


def _facts(path: Path) -> Gguf:
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ExportRefused(
            f"expected a GGUF file at {path}, found none ({error}); export one first"
        ) from error

    def value(key: str, default: Any) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    def token(which: str) -> str:
        number, tokens = (
            value(f"tokenizer.ggml.{which}_token_id", None),
            reader.get_field("tokenizer.ggml.tokens"),
        )
        return "" if number is None or tokens is None else str(tokens.contents(int(number)))

    architecture = value("general.architecture", "")
    stop = [text for text in dict.fromkeys((token("eos"), token("eot"))) if text]
    return Gguf(
        context=int(value(f"{architecture}.context_length", CONTEXT)),
        bos=token("bos"),
        stop=stop,
        bos_added=bool(value("tokenizer.ggml.add_bos_token", False)),
        jinja=str(value("tokenizer.chat_template", "")),
    )


# --- Chat templates ---


Turns = list[dict[str, str]]

_S, _U, _V, _W = "<<<system>>>", "<<<first>>>", "<<<answer>>>", "<<<second>>>"
_SYSTEM, _FIRST = {"role": "system", "content": _S}, {"role": "user", "content": _U}
_ANSWER, _SECOND = {"role": "assistant", "content": _V}, {"role": "user", "content": _W}
_SAMPLE_CHATS: tuple[Turns, ...] = (
    [_FIRST],
    [_SYSTEM, _FIRST],
    [_FIRST, _ANSWER, _SECOND],
    [_SYSTEM, _FIRST, _ANSWER, _SECOND],
    [
        _SYSTEM,
        _FIRST,
        _ANSWER,
        _SECOND,
        {"role": "assistant", "content": "a\nb"},
        {"role": "user", "content": "c"},
    ],
)


@dataclass(frozen=True)
class GoTemplate:
    """The texts around each turn, and Ollama's template made of them."""

    start: str
    role_markers: dict[str, tuple[str, str]]
    """Role -> text before and after its content."""
    answer: str
    """Text that begins an answer."""
    system: str
    """System turn for conversations without one; empty without a default."""

    def render(self, turns: Turns) -> str:
        """Ollama's prompt for a conversation that ends with the user's turn."""
        if self.system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self.system}, *turns]
        text = "".join(
            self.role_markers[turn["role"]][0] + turn["content"] + self.role_markers[turn["role"]][1]
            for turn in turns
        )
        return self.start + text + self.answer

    @property
    def text(self) -> str:
        """The template in Go's text/template over Ollama's `.Messages`."""
        roles = "".join(
            f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for number, (role, (before, after)) in enumerate(self.role_markers.items())
        )
        return f"{self.start}{{{{ range .Messages }}}}{roles}{{{{ end }}}}{{{{ end }}}}{self.answer}"

    @property
    def stop(self) -> list[str]:
        return [end] if (end := self.role_markers["assistant"][1].strip()) else []


def template_translated(jinja: str, bos: str, eos: str, *, bos_added: bool) -> GoTemplate | None:
    """A model's Jinja chat template for Ollama; None unless turns are consecutive blocks of text.

    The texts around turns are read off rendered conversations. The translation must render the same text as the
    original on conversations of one to six turns, with and without a system turn. bos_added: the server writes `bos`
    itself.
    """
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    sandbox.globals.update(
        raise_exception=_refuse, strftime_now=lambda form: datetime.date.today().strftime(form)
    )

    def render(turns: Turns, answer: bool = True) -> str:
        return template.render(messages=turns, add_generation_prompt=answer, bos_token=bos, eos_token=eos)

    try:
        template = sandbox.from_string(jinja)
        translation = _read_off(render, eos)
        if translation is None or any(translation.render(turns) != render(turns) for turns in _SAMPLE_CHATS):
            return None
    except (TemplateError, TypeError, KeyError, ValueError):
        return None  # it refuses a system turn, or reads what Ollama does not tell it
    if any(
        "{{" in text or "}}" in text
        for text in (translation.start, translation.answer, *sum(translation.role_markers.values(), ()))
    ):
        return None
    if bos and bos_added:
        before, after = translation.role_markers["system"]
        around = {
            **translation.role_markers,
            "system": (before.removeprefix(bos) if not translation.start else before, after),
        }
        translation = GoTemplate(
            translation.start.removeprefix(bos), around, translation.answer, translation.system
        )
    return translation


def _read_off(render: Any, eos: str) -> GoTemplate | None:
    open_end, invited = render([_FIRST], False), render([_FIRST])
    # some templates write the end-of-text token without a generation prompt (Phi 3)
    closing = "" if invited.startswith(open_end) else eos
    open_end = open_end.removesuffix(closing)
    whole = render([_SYSTEM, _FIRST, _ANSWER, _SECOND])
    marks = [_S, _U, _V, _W]
    if not invited.startswith(open_end) or any(whole.count(mark) != 1 for mark in marks):
        return None
    answer = invited.removeprefix(open_end)
    pieces = []
    rest = whole
    for mark in marks:
        piece, _, rest = rest.partition(mark)
        pieces.append(piece)
    system_start, system_to_user, user_to_answer, answer_to_user = pieces
    user_after = open_end.partition(_U)[2]
    answer_after = render([_FIRST, _ANSWER], False).removesuffix(closing).partition(_V)[2]
    user_before = answer_to_user.removeprefix(answer_after)
    answer_before = user_to_answer.removeprefix(user_after)
    system_after = system_to_user.removesuffix(user_before)
    start = open_end.partition(_U)[0].removesuffix(user_before)
    default = ""
    if not system_start.startswith(start):
        # it writes its own system turn if none is given
        default = start.removeprefix(system_start).removesuffix(system_after)
        start = ""
    return GoTemplate(
        start,
        {
            "system": (system_start.removeprefix(start), system_after),
            "user": (user_before, user_after),
            "assistant": (answer_before, answer_after),
        },
        answer,
        default,
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)
