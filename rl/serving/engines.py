"""Servers of LOCAL_BACKENDS: the models each lists, and the adapters that vLLM and llama.cpp's server take.

vLLM loads adapters while it runs: https://docs.vllm.ai/en/latest/features/lora/#dynamically-serving-lora-adapters
llama-server reads them at its start, and a request names one by its number: tools/server/README.md of llama.cpp
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from django.conf import settings
from django.db import DatabaseError
from django_q.tasks import async_task
from urllib3.exceptions import HTTPError

from feedback.cache import TTLCache
from rl.checksums import FileDamaged
from rl.models import EngineAdapter, Policy
from rl.registry.integrity import adapter_folder
from rl.serving.base import BackendFailed, Model
from rl.serving.dialects.chat import error_read, key_hidden
from rl.serving.files import adapter_make, base_source, model_of

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from rl.serving.endpoint import EndpointBackend

logger = logging.getLogger("rl.serving")

VLLM, LLAMA = "vllm", "llamacpp"
"""`owned_by` in the lists of the two servers that take adapters."""
UNPUBLISHED = "unpublished"
"""Kind of a failure: the server has the policy's base and not (yet) its adapter. The base must not stand in."""
LIST_S = 60.0
"""Seconds for which a server's list of models is believed."""
LIST_AGAIN_S = 2.0
"""Seconds until a model that is not on the list is looked for again."""
ADAPTERS_S = 10.0
"""Seconds that llama-server may take to list its adapters, between two steps of other answers."""
LOAD_S = 120.0
"""Seconds that a server may take to load an adapter, or to answer a probe: the first one compiles."""
SOON_S = 10.0
"""Least seconds between two reconciliations that requests of this process ask for."""
PROBE = [{"role": "user", "content": "Say in one sentence what you can do."}]
LEAST_DIFFERENCE = 1e-5
"""Difference of log-probabilities, in nats, below which a probe's answer counts as the base's."""

_proved: TTLCache[bool] = TTLCache()
_soon_at = -math.inf


class EngineFailed(RuntimeError):
    """A server does not answer with an adapter; the message says why."""

    def __init__(self, message: str, *, backs_off: bool = True) -> None:
        super().__init__(message)
        self.backs_off = backs_off
        """False where the next look costs nothing."""


def reconcile_soon(**_: object) -> None:
    """Have a worker bring the servers of LOCAL_BACKENDS up to date. Receiver of `policy_moved`."""
    if not any(name.startswith("http") for name in settings.LOCAL_BACKENDS):
        return
    try:
        async_task("rl.tasks.engines", task_name="engines")
    except DatabaseError as error:
        logger.warning("the workers were not told to look after the engines: %s", error)


def adapter_missed() -> None:
    """`reconcile_soon` for a request that met a server without its adapter."""
    global _soon_at
    if time.monotonic() - _soon_at > SOON_S:
        _soon_at = time.monotonic()
        reconcile_soon()


@dataclass(frozen=True)
class Listed:
    """A row of `GET /models`."""

    name: str
    root: str
    """vLLM: the path of the model or adapter."""
    parent: str
    """vLLM: the base of an adapter; empty for a base."""
    owner: str


class Engine:
    """One server of LOCAL_BACKENDS, as its list of models describes it."""

    def __init__(self, server: EndpointBackend) -> None:
        self._server = server
        self.name = server.name
        self._rows: Sequence[Listed] = ()
        self._at = -math.inf
        self._lock = threading.Lock()

    # --- Of a request -----------------------------------------------------------------------------------------

    def place_of(self, model: Model) -> tuple[str, Mapping[str, object]]:
        """The server's name of a model, and further fields of its requests. Raises BackendFailed: `unlisted`, or
        `unpublished` where only the adapter is missing."""
        with self._lock:
            age = time.monotonic() - self._at
            found = self._find(model)
            if age > LIST_S or (found is None and age > LIST_AGAIN_S):
                self._read()
                found = self._find(model)
            kind, base = self.kind, self._base(model.base_model)
        if found is not None:
            # llama-server applies all its adapters to a request that names none
            return found.name, {"lora": [{"id": 0, "scale": 0.0}]} if kind == LLAMA else {}
        if kind not in (VLLM, LLAMA) or base is None or model.is_the_apps:
            there = ", ".join(row.name for row in self._rows[:5]) or "no model"
            wanted = model.base_model if model.is_the_apps else model.name
            raise BackendFailed(
                f"{self.name} does not have {wanted}: its list of models has {there}", kind="unlisted"
            )
        if kind == LLAMA and is_proved(self.name, model.name):
            number = self._number(model)
            if number is not None:
                return base.name, {"lora": [{"id": number, "scale": 1.0}]}
        raise BackendFailed(
            f"{self.name} does not answer with the adapter {model.name} yet", kind=UNPUBLISHED
        )

    def forgot(self, name: str) -> bool:
        """True if an adapter was on the list; the server says it does not know it, so the list is read again."""
        with self._lock:
            self._at = -math.inf
            return any(row.name == name and row.parent for row in self._rows)

    def _find(self, model: Model) -> Listed | None:
        if model.is_the_apps:
            return self._base(model.base_model)
        return next((row for row in self._rows if row.name in (model.name, f"{model.name}:latest")), None)

    def _base(self, base_model: str) -> Listed | None:
        names = {base_model, f"{base_model}:latest", base_source(base_model)}
        return next((row for row in self._rows if not row.parent and names & {row.name, row.root}), None)

    @property
    def kind(self) -> str:
        """VLLM, LLAMA, or another server's name for itself: it takes no adapters."""
        return self._rows[0].owner if self._rows else ""

    def _read(self) -> None:
        server = self._server
        server.breaker.enter()
        try:
            response = server.get("models", server.endpoint.connect_timeout_s)
            rows = [
                Listed(str(row["id"]), *(str(row.get(key) or "") for key in ("root", "parent", "owned_by")))
                for row in json.loads(response.data)["data"]
            ]
        except (HTTPError, OSError) as error:
            server.breaker.record_failure()
            raise BackendFailed(f"{self.name} cannot be reached: {error}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BackendFailed(
                f"{self.name} answered {response.status} to GET /models, and no list of models: "
                f"{key_hidden(response.data, server.endpoint.key)[:200]!r}",
                kind="refused",
            ) from error
        server.breaker.record_success()
        self._rows, self._at = rows, time.monotonic()

    def _number(self, model: Model) -> int | None:
        """llama-server's number of an adapter now: another start may give it another one."""
        if not model.adapter:
            return None
        try:
            held = json.loads(self._server.get("../lora-adapters", ADAPTERS_S).data)
            return next((row["id"] for row in held if f"/{row['path']}".endswith(f"/{model.adapter}")), None)
        except (HTTPError, OSError, KeyError, TypeError, ValueError) as error:
            raise BackendFailed(f"{self.name} does not list its adapters: {error}") from error

    # --- Of the reconciler ------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read the list now. Raises BackendFailed."""
        with self._lock:
            self._read()

    def wants(self, policy: Policy) -> bool:
        """True if the server takes adapters and has the policy's base."""
        return self.kind in (VLLM, LLAMA) and self._base(policy.base_model) is not None

    def holds(self, policy: Policy) -> bool:
        """True if it has the policy's adapter, proved or not. Raises BackendFailed."""
        if self.kind == LLAMA:
            return self._number(model_of(policy)) is not None
        return any(row.name == policy.name and row.parent for row in self._rows)

    def publish(self, policy: Policy, beside: Sequence[Policy]) -> None:
        """Load a policy's adapter and prove it by a probe: only then it has the policy's name.

        beside: all policies that it should hold. Raises EngineFailed.
        """
        if self.kind == LLAMA:
            self._prove_loaded(policy, beside)
            return
        try:
            adapter_folder(policy)
        except FileDamaged as damage:
            raise EngineFailed(str(damage)) from damage
        path = str(settings.ENGINE_HOME / policy.adapter_path)
        named = next((row for row in self._rows if row.name == policy.name), None)
        if named is not None and named.root == path:  # by `--lora-modules`, at its start
            try:
                self._prove(policy, policy.name, {})
            except EngineFailed:
                self.unload(policy.name)
                raise
            return
        if named is not None:
            self.unload(policy.name)
        trial = f"{policy.name}.probe"
        self.unload(trial)  # of a process that died
        self._load(trial, path)
        try:
            self._prove(policy, trial, {})
        finally:
            self.unload(trial)
        self._load(policy.name, path)
        self.refresh()

    def unload(self, name: str) -> None:
        """Have vLLM forget an adapter; one that it does not have is no error. Raises EngineFailed."""
        if self.kind == VLLM:
            self._call("unload_lora_adapter", {"lora_name": name}, none=404)

    def _load(self, name: str, path: str) -> None:
        self._call("load_lora_adapter", {"lora_name": name, "lora_path": path})

    def _prove_loaded(self, policy: Policy, beside: Sequence[Policy]) -> None:
        """Prove an adapter that llama-server read at its start."""
        model = model_of(policy)
        if not model.adapter:
            adapter_make(policy.name)
            raise EngineFailed(
                "its adapter is being written as a GGUF file for llama-server", backs_off=False
            )
        number = self._number(model)
        if number is None:
            files = ",".join(
                str(settings.ENGINE_HOME / path) for one in beside if (path := model_of(one).adapter)
            )
            raise EngineFailed(
                "llama-server reads adapters at its start only: start it again with "
                f"--lora-init-without-apply --lora {files}",
                backs_off=False,
            )
        self._prove(policy, "", {"lora": [{"id": number, "scale": 1.0}]})

    def _prove(self, policy: Policy, name: str, fields: Mapping[str, object]) -> None:
        """Compare the likeliest first tokens of an answer with those of the base, which is asked twice: what differs
        between those two is noise."""
        base = self._base(policy.base_model)
        if base is None:
            raise EngineFailed(f"{self.name} no longer has {policy.base_model}")
        plain = {"lora": [{"id": 0, "scale": 0.0}]} if self.kind == LLAMA else {}
        first, again = (self._first_token(base.name, plain) for _ in range(2))
        found = self._first_token(name or base.name, fields)
        difference, noise = _difference(found, first), _difference(again, first)
        if difference <= max(2 * noise, LEAST_DIFFERENCE):
            raise EngineFailed(
                f"its probe answer is the base model's (log-probabilities differ by {difference:.2g}, two answers of "
                f"the base by {noise:.2g}): the adapter is not applied, or changes nothing"
            )

    def _first_token(self, name: str, fields: Mapping[str, object]) -> dict[str, float]:
        body = {"model": name, "messages": PROBE, "max_tokens": 1, "temperature": 0, "logprobs": True}
        said = self._call("chat/completions", {**body, "top_logprobs": 20, **fields})
        try:
            tokens = said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return {str(row["token"]): float(row["logprob"]) for row in tokens}
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineFailed(
                f"its probe answer has no log-probabilities: {json.dumps(said)[:200]}"
            ) from error

    def _call(self, path: str, body: Mapping[str, object], *, none: int = 0) -> Any:
        """The JSON answer to a POST; None for words alone, and for the status that means there is nothing to do."""
        try:
            response = self._server.post(path, body, LOAD_S)
        except (HTTPError, OSError) as error:
            raise EngineFailed(f"{self.name} cannot be reached: {error}") from error
        if response.status == none:
            return None
        if response.status != 200:
            reason = self._server.key_hidden(error_read(response.data)[0])
            if response.status == 404 and path.endswith("lora_adapter") and "Not Found" in reason:
                reason = "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"
            raise EngineFailed(f"{path} answered {response.status}: {reason}")
        try:
            return json.loads(response.data)
        except ValueError:
            return None


def engine_name(address: str) -> str:
    """Host and port of an address of LOCAL_BACKENDS."""
    return urlsplit(address).netloc.rpartition("@")[2]


def adapters_here() -> QuerySet[EngineAdapter]:
    """Adapters of the servers that LOCAL_BACKENDS lists; another node may list others."""
    names = [engine_name(address) for address in settings.LOCAL_BACKENDS]
    return EngineAdapter.objects.filter(engine__in=names)


def is_proved(engine: str, policy: str) -> bool:
    """True if a policy's probe answer came from its adapter on an engine."""
    rows = EngineAdapter.objects.filter(engine=engine, policy=policy)
    return _proved.get((engine, policy), lambda: rows.exclude(proved_at=None).exists())


def _difference(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """Largest difference of log-probabilities of the tokens that both have; infinite where there is none."""
    return max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=math.inf)
