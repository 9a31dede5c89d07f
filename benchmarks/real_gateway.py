"""The gateway with a real model against llama.cpp alone: same file, same prompts, same number of tokens.

    python benchmarks/real_gateway.py model.gguf [--adapter lora.gguf] [--rounds 5] [--tokens 128]

Rows: free text of --tokens tokens (greedy, and drawn at a temperature of 0.7), and a JSON object within a schema.
Columns: llama.cpp's C API with its own sampler and a context of its defaults, llama-cpp-python's `create_completion`,
and the gateway over HTTP (gunicorn, one worker, SQLite, decisions recorded), whole and streamed. Each round asks all of
them once, one after the other, with a question of its own behind a system prompt that stays: every column may keep
what it computed of that. `new` rounds begin with a system prompt of their own, so that nothing is kept.

The schema of the JSON row leaves llama.cpp nothing to do: it writes the same number of tokens freely. Prints one JSON
object: medians of the rounds, in milliseconds and tokens a second, and each column's share of llama.cpp's speed.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import llama_cpp  # noqa: E402

from tests.support.server import Server  # noqa: E402

POLICY, BASE_HASH = "bench-v1", "sha256:" + "b" * 64
STORY = "You are a writer. Write long stories, with much detail, about what you are asked for."
TRIAGE = (
    'You sort messages of customers of a shop. Answer with JSON: {"queue": one of billing, shipping, returns, '
    'technical, account, "urgent": true or false}. Urgent: anger, danger or a loss of money.'
)
SCHEMA = {
    "type": "object",
    "properties": {
        "queue": {"enum": ["billing", "shipping", "returns", "technical", "account"]},
        "urgent": {"type": "boolean"},
    },
    "required": ["queue", "urgent"],
    "additionalProperties": False,
}
THINGS = [
    "kettle",
    "tent",
    "blender",
    "rain jacket",
    "desk lamp",
    "road bike",
    "toaster",
    "printer",
    "backpack",
]


@dataclass(frozen=True)
class Question:
    """One question of a round, and how many tokens its answer has."""

    messages: list[dict[str, str]]
    tokens: int
    temperature: float = 0.0
    schema: dict[str, Any] | None = None


@dataclass
class Column:
    """Seconds and tokens of one way of answering."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """Seconds until the first words, of a stream."""

    def figures(self) -> dict[str, float]:
        rates = [count / took for count, took in zip(self.tokens, self.seconds, strict=True)]
        found = {
            "ms": round(1e3 * statistics.median(self.seconds), 1),
            "tokens": statistics.median(self.tokens),
            "tokens_per_second": round(statistics.median(rates), 1),
        }
        if self.first:
            found["first_words_ms"] = round(1e3 * statistics.median(self.first), 1)
        return found


class Alone:
    """llama.cpp without the gateway: by its C API, and by llama-cpp-python."""

    def __init__(self, file: Path, adapter: Path | None) -> None:
        cores = len(os.sched_getaffinity(0))
        self.llama = llama_cpp.Llama(
            str(file),
            n_ctx=4096,
            n_threads=cores,
            n_threads_batch=cores,
            verbose=False,
            lora_path=str(adapter) if adapter else None,
        )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_threads, options.n_threads_batch = 4096, cores, cores
        model = self.llama._model.model
        self.context = llama_cpp.llama_init_from_model(model, options)
        self.memory = llama_cpp.llama_get_memory(self.context)
        if adapter:
            lora = llama_cpp.llama_adapter_lora_init(model, str(adapter).encode())
            pointers = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(lora)
            llama_cpp.llama_set_adapters_lora(self.context, pointers, 1, (ctypes.c_float * 1)(1.0))
        self.held: list[int] = []

    def tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        template = self.llama.metadata["tokenizer.chat_template"]
        formatter = llama_cpp.llama_chat_format.Jinja2ChatFormatter(template, "", "", stop_token_ids=[])
        prompt = formatter(messages=list(messages)).prompt  # type: ignore[arg-type]
        return self.llama.tokenize(prompt.encode(), add_bos=False, special=True)

    def low_level(self, question: Question) -> tuple[float, int]:
        """A loop of decode and sample in C, the end of the text passed over."""
        lib, began = llama_cpp, time.perf_counter()
        prompt = self.tokens(question.messages)
        sampler = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if question.temperature:
            lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_temp(question.temperature))
            lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_dist(1))
        else:
            lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_greedy())
        pairs = zip(self.held, prompt[:-1], strict=False)
        shared = next((n for n, (one, other) in enumerate(pairs) if one != other), 0)
        lib.llama_memory_seq_rm(self.memory, 0, shared, -1)
        self.held = list(prompt)
        waiting = prompt[shared:]
        for _ in range(question.tokens):
            batch = (lib.llama_token * len(waiting))(*waiting)
            if lib.llama_decode(self.context, lib.llama_batch_get_one(batch, len(waiting))):
                raise SystemExit("llama_decode failed")
            waiting = [lib.llama_sampler_sample(sampler, self.context, -1)]
        lib.llama_sampler_free(sampler)
        return time.perf_counter() - began, question.tokens

    def completion(self, question: Question) -> tuple[float, int]:
        began = time.perf_counter()
        prompt = self.tokens(question.messages)
        found: Any = self.llama.create_completion(
            prompt,
            max_tokens=question.tokens,
            temperature=question.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repeat_penalty=1.0,
            seed=1,
        )
        return time.perf_counter() - began, int(found["usage"]["completion_tokens"])


class Gateway:
    """The policy behind gunicorn."""

    def __init__(self, server: Server, key: str) -> None:
        self.port = server.port
        self.head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def ask(self, question: Question, *, stream: bool = False) -> tuple[float, int, float]:
        """Seconds, tokens written, and seconds until the first words of a stream."""
        body: dict[str, Any] = {
            "model": POLICY,
            "messages": question.messages,
            "max_tokens": question.tokens if question.schema is None else 200,
            "temperature": question.temperature,
            "seed": 1,
        }
        if question.schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "triage", "schema": question.schema},
            }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), self.head)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"the gateway answered {response.status}: {response.read()[:500]!r}")
        if not stream:
            found = json.loads(response.read())
            return time.perf_counter() - began, int(found["usage"]["completion_tokens"]), 0.0
        first, tokens = 0.0, 0
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line[6:])
            if not first and any(choice["delta"].get("content") for choice in part["choices"]):
                first = time.perf_counter() - began
            tokens = int((part.get("usage") or {}).get("completion_tokens", tokens))
        return time.perf_counter() - began, tokens, first


def policy_made(server: Server, file: Path, adapter: Path | None) -> None:
    """A policy that is served from these files."""
    if adapter is not None:
        folder = server.home / "exports" / "bases" / BASE_HASH.replace(":", "-")[:40]
        folder.mkdir(parents=True)
        (folder / "base-q8_0.gguf").symlink_to(file)
    form, path = ("gguf", file) if adapter is None else ("gguf-lora", adapter)
    server.manage(
        "shell",
        "-v",
        "0",
        "-c",
        "from rl.models import Policy; "
        f"policy = Policy.objects.create(name={POLICY!r}, agent='bench', base_model='bench', "
        f"base_model_hash={BASE_HASH!r}, adapter_path='bench'); "
        f"policy.artifacts.create(format={form!r}, path={str(path)!r}, bytes={path.stat().st_size}, sha256='')",
    )


def measured(alone: Alone, gateway: Gateway, rounds: int, tokens: int, *, new: bool) -> dict[str, Any]:
    """Every row with every column. new: each question has a system prompt of its own, so that nothing is kept."""

    def question(kind: str, number: int, count: int) -> Question:
        mark = f"[{kind} {number}] " if new else ""
        thing = THINGS[number % len(THINGS)]
        if kind == "json":
            text = f"Hello, the {thing} I ordered {number + 2} days ago makes a strange noise and I am angry."
            return Question(_messages(mark + TRIAGE, text), count, schema=SCHEMA)
        text = f"Write a long story about a lighthouse keeper, the sea and a {thing}."
        return Question(_messages(mark + STORY, text), count, 0.7 if kind == "drawn" else 0.0)

    found: dict[str, Any] = {}
    for kind in ("greedy", "drawn", "json"):
        columns = {
            name: Column() for name in ("llama.cpp", "create_completion", "gateway", "gateway streamed")
        }
        for number in range(-1, rounds):
            count = tokens
            if kind == "json":
                # as many tokens as the object has; its own round, so that the measured one finds no more kept
                count = gateway.ask(question(kind, number + 100, 0))[1]
            calls: dict[str, Callable[[Question], Sequence[float]]] = {
                "llama.cpp": alone.low_level,
                "create_completion": alone.completion,
                "gateway": gateway.ask,
                "gateway streamed": lambda some: gateway.ask(some, stream=True),
            }
            for place, (name, call) in enumerate(calls.items()):
                # a question of its own, so that the streamed answer finds no more kept than the whole one
                took, written, *rest = call(question(kind, 4 * number + place + 200, count))
                if number < 0:
                    continue  # warms up
                columns[name].seconds.append(took)
                columns[name].tokens.append(int(written))
                if rest and rest[0]:
                    columns[name].first.append(rest[0])
        figures = {name: column.figures() for name, column in columns.items()}
        for one in figures.values():
            one["share"] = round(one["tokens_per_second"] / figures["llama.cpp"]["tokens_per_second"], 3)
        found[kind] = figures
    return found


def _messages(system: str, text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    file = options.file.resolve()
    adapter = options.adapter.resolve() if options.adapter else None
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder:
        home = Path(folder)
        server = Server(f"sqlite:///{home / 'db.sqlite3'}", home, workers=1, threads=4)
        server.migrate()
        key = server.key("ingest", "read")
        policy_made(server, file, adapter)
        with server:
            gateway = Gateway(server, key)
            alone = Alone(file, adapter)
            kept = measured(alone, gateway, options.rounds, options.tokens, new=False)
            new = measured(alone, gateway, max(options.rounds // 2, 1), options.tokens, new=True)
    print(
        json.dumps(
            {
                "benchmark": "real_gateway",
                "file": file.name,
                "adapter": adapter.name if adapter else None,
                "machine": {
                    "cores": len(os.sched_getaffinity(0)),
                    "load": os.getloadavg()[0],
                    "python": platform.python_version(),
                    "llama_cpp": llama_cpp.__version__,
                },
                "system_prompt_kept": kept,
                "nothing_kept": new,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
