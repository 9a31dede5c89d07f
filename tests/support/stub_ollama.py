"""An Ollama server on a real socket: blobs by digest, create as a status stream, tags, show, copy, delete."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tests.support.stub_server import Stub, StubHandler, StubServer


class OllamaServer(Stub):
    """Keeps what it is sent, and refuses what the real one refuses with the real one's words."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.models: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.created: list[dict[str, Any]] = []
        self.cut_uploads = 0
        """Break so many uploads off in the middle."""
        self.adapters_known = True
        """Newer servers load none."""
        self.create_error = ""
        stub = self

        class Handler(StubHandler):
            def do_HEAD(self) -> None:
                stub.asked.append(("HEAD", self.path))
                self.answer(200 if self._digest() in stub.blobs else 404)

            def do_GET(self) -> None:
                stub.asked.append(("GET", self.path))
                listed = [
                    {
                        "model": name,
                        "name": name,
                        "digest": facts["digest"],
                        "size": 3,
                        "modified_at": "2026-11-21T09:00:00Z",
                        "details": {},
                    }
                    for name, facts in stub.models.items()
                ]
                self.answer(200, {"models": listed})

            def do_POST(self) -> None:
                stub.asked.append(("POST", self.path))
                if self.path.startswith("/api/blobs/"):
                    return self._blob()
                order = json.loads(self.body())
                if self.path == "/api/create":
                    return self._create(order)
                if self.path == "/api/show":
                    facts = stub.models.get(stub.full(order["model"]))
                    if facts is None:
                        return self.answer(404, {"error": f"model '{order['model']}' not found"})
                    return self.answer(
                        200, {"template": facts.get("template", ""), "model_info": {}, "details": {}}
                    )
                if self.path == "/api/copy":
                    facts = stub.models.get(stub.full(order["source"]))
                    if facts is None:
                        return self.answer(404, {"error": f'model "{order["source"]}" not found'})
                    stub.models[stub.full(order["destination"])] = facts
                    return self.answer(200)
                return self.answer(404, {"error": "no such path"})

            def do_DELETE(self) -> None:
                stub.asked.append(("DELETE", self.path))
                name = stub.full(json.loads(self.body())["model"])
                if stub.models.pop(name, None) is None:
                    return self.answer(404, {"error": f"model '{name}' not found"})
                return self.answer(200)

            def _digest(self) -> str:
                return self.path.rsplit("/", 1)[-1]

            def _blob(self) -> None:
                if stub.cut_uploads > 0:
                    stub.cut_uploads -= 1
                    self.rfile.readline()
                    self.cut()
                    return None
                body = self.body()
                if f"sha256:{hashlib.sha256(body).hexdigest()}" != self._digest():
                    return self.answer(400, {"error": "digest mismatch"})
                stub.blobs[self._digest()] = body
                return self.answer(201)

            def _create(self, order: dict[str, Any]) -> None:
                files, adapters = order.get("files") or {}, order.get("adapters") or {}
                error = stub.create_error
                if adapters and not stub.adapters_known:
                    error = "LoRA adapters are no longer supported"
                elif not files and "from" not in order:
                    error = "neither 'from' or 'files' was specified"
                elif missing := [d for d in (*files.values(), *adapters.values()) if d not in stub.blobs]:
                    error = f"blob {missing[0]} not found"
                if error:
                    return self.answer(400, {"error": error})
                stub.created.append(order)
                stub.models[stub.full(order["model"])] = {
                    **order,
                    "digest": hashlib.sha256(json.dumps(order, sort_keys=True).encode()).hexdigest(),
                }
                said = [{"status": "parsing GGUF"}, {"status": "writing manifest"}, {"status": "success"}]
                raw = b"".join(json.dumps(line).encode() + b"\n" for line in said)
                return self.answer(200, raw, Content_Type="application/x-ndjson")

            def body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return super().body()
                body = b""
                while size := int(self.rfile.readline().strip() or b"0", 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

        self.server = StubServer(Handler)
        self.url = self.server.address

    @staticmethod
    def full(name: str) -> str:
        return name if ":" in name else f"{name}:latest"
