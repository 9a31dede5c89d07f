"""The REST endpoint of an agent's base model: read it, set it."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import CamelAnswer, CamelSent, Query
from backend.rest.errors import RequestRefused
from backend.rest.reading import body_read, query_read
from backend.rest.schema import describe
from backend.rest.views import ApiView
from rl.api.training import AGENT, BaseModelName, agent_checked
from rl.base_models.service import addition_of, agent_base_model, base_model_set
from rl.base_models.sources import SourceRefused
from rl.jobs.base_models import base_model_add_dispatch


class AgentBaseSent(CamelSent):
    base_model: BaseModelName
    """A folder, a hub name, a GGUF file, ollama:NAME, package:NAME, smollm2 or bundled; empty removes the setting."""


class AgentBaseShown(CamelAnswer):
    agent: str
    base_model: str
    """As `--model` takes it."""
    path: str
    """Folder or hub name; empty while it is not added yet."""
    origin: str
    """Who named it."""
    adding: str
    """What the worker that adds it does now; empty where none does."""


class AgentBaseModel(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "Read an agent's base model",
        {200: ("The base model that is trained next, and who named it", AgentBaseShown)},
        parameters=(AGENT,),
        tag="policies",
        operation="agent_base_read",
    )
    def get(self, request: Request, agent: str) -> Response:
        query_read(Query, request)
        return Response(_represent(agent_checked(agent)))

    @describe(
        "Set an agent's base model",
        {200: ("The base model; one that was not added yet is added by a worker", AgentBaseShown)},
        body=AgentBaseSent,
        parameters=(AGENT,),
        tag="policies",
        operation="agent_base_set",
    )
    def post(self, request: Request, agent: str) -> Response:
        sent = body_read(AgentBaseSent, request.data)
        slug = agent_checked(agent)
        try:
            found = base_model_set(slug, sent.base_model)
        except SourceRefused as refusal:
            raise RequestRefused(f"baseModel: {refusal}", fields={"baseModel": str(refusal)}) from refusal
        if not found.is_ready:
            base_model_add_dispatch(found.name)
        return Response(_represent(slug))


def _represent(agent: str) -> dict[str, object]:
    found = agent_base_model(agent)
    addition = addition_of(found.name)
    return AgentBaseShown.of(
        found, agent=agent, base_model=found.name, adding=addition.words if addition else ""
    )
