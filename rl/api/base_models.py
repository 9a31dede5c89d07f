"""The REST endpoint of an agent's base model: read it, set it."""

from __future__ import annotations

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import RequestRefused
from backend.rest.reading import object_in, parameters
from backend.rest.schema import describe, ref
from backend.rest.views import ApiView
from rl.api.training import AGENT, agent_checked, text
from rl.base_models.service import addition_of, agent_base_model, base_model_set
from rl.base_models.sources import SourceRefused
from rl.jobs.base_models import base_model_add_dispatch


class AgentBaseModel(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "Read an agent's base model",
        {200: ("The base model that is trained next, and who named it", ref("AgentBaseShown"))},
        parameters=(AGENT,),
        tag="policies",
        operation="agent_base_read",
    )
    def get(self, request: Request, agent: str) -> Response:
        parameters(request, ())
        return Response(_represent(agent_checked(agent)))

    @describe(
        "Set an agent's base model",
        {200: ("The base model; one that was not added yet is added by a worker", ref("AgentBaseShown"))},
        body=ref("AgentBaseSent"),
        parameters=(AGENT,),
        tag="policies",
        operation="agent_base_set",
    )
    def post(self, request: Request, agent: str) -> Response:
        facts = object_in(request.data, required=("baseModel",), optional=())
        slug = agent_checked(agent)
        try:
            found = base_model_set(slug, text(facts, "baseModel"))
        except SourceRefused as refusal:
            raise RequestRefused(f"baseModel: {refusal}", fields={"baseModel": str(refusal)}) from refusal
        if not found.is_ready:
            base_model_add_dispatch(found.name)
        return Response(_represent(slug))


def _represent(agent: str) -> dict[str, Any]:
    found = agent_base_model(agent)
    addition = addition_of(found.name)
    return {
        "agent": agent,
        "baseModel": found.name,
        "path": found.path,
        "origin": found.origin,
        "adding": addition.words if addition else "",
    }
