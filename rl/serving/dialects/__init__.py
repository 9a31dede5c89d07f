"""The dialects that endpoints speak: each is written from a chat request and read as a chat completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rl.serving.dialects import anthropic, chat, responses
from rl.serving.dialects.chat import Object, Sent


@dataclass(frozen=True)
class Dialect:
    """How a chat request is written for an endpoint, and how its answer is read."""

    path: str
    headers: Callable[[str], dict[str, str]]
    write: Callable[[Object], Sent]
    whole: Callable[[Object, str], Object]
    chunks: Callable[[Iterable[Object], str], Iterator[Object]]


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


DIALECTS = {
    "openai": Dialect("chat/completions", _bearer, chat.request_write, chat.chat_whole, chat.chat_chunks),
    "responses": Dialect("responses", _bearer, responses.request_write, responses.whole, responses.chunks),
    "anthropic": Dialect(
        "messages", anthropic.headers, anthropic.request_write, anthropic.whole, anthropic.chunks
    ),
}
