"""The REST endpoints of reward models: the list of them, and scores of responses."""

from __future__ import annotations

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import RequestRefused
from backend.rest.pages import PARAMETERS as PAGE_PARAMETERS
from backend.rest.pages import page_of
from backend.rest.reading import object_in, parameters
from backend.rest.schema import describe, page_schema, ref
from backend.rest.views import ApiView
from rl.api.loop import OF_AGENT, PAGING
from rl.api.training import agent_checked, text
from rl.evaluation.scorer import MAX_CHARS, MAX_RESPONSES, ScorerAway, responses_score
from rl.models import RewardModelVersion
from rl.reward_models.service import ranks_above_chance, reward_model_represent
from rl.serving.chat_request import ROLES


class RewardModels(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "List reward models, newest first",
        {200: ("A page of them", page_schema(ref("RewardModel")))},
        parameters=(OF_AGENT, *PAGING),
        tag="rewards",
        operation="reward_models_list",
    )
    def get(self, request: Request) -> Response:
        given = parameters(request, ("agent", *PAGE_PARAMETERS))
        found = RewardModelVersion.objects.order_by("-pk")
        if "agent" in given:
            found = found.filter(agent=agent_checked(given["agent"]))
        return Response(page_of(found, request, reward_model_represent))


class ScorerUnavailable(RequestRefused):
    """No scorer answers now."""

    def __init__(self, error: ScorerAway) -> None:
        self.wait = error.retry_after_s
        super().__init__(f"{error}; try again in {self.wait} s", code="unavailable", status=503)


class Score(ApiView):
    scopes = {"POST": "ingest"}

    @describe(
        "Score responses with a reward model",
        {200: ("A score for each response", ref("Scores"))},
        body=ref("ScoreSent"),
        refusals=(404, 409),
        tag="rewards",
        operation="responses_score",
        description=f"`prompt` or `messages`; 1 to {MAX_RESPONSES} responses, {MAX_CHARS:,} characters in "
        "all. The first call after a pause waits for the model to load, or gets 503 with "
        "Retry-After.",
    )
    def post(self, request: Request) -> Response:
        sent = object_in(
            request.data, required=("agent", "responses"), optional=("prompt", "messages", "rewardModel")
        )
        agent, responses = agent_checked(text(sent, "agent")), sent["responses"]
        if not isinstance(responses, list) or not all(_is_text(response) for response in responses):
            raise RequestRefused(
                "responses: expected a list of texts", fields={"responses": "expected a list of texts"}
            )
        try:
            scores = responses_score(agent, _messages(sent), responses, text(sent, "rewardModel"))
        except ScorerAway as error:
            raise ScorerUnavailable(error) from error
        return Response(
            {
                "agent": agent,
                "rewardModel": scores.version.name,
                "objective": scores.version.objective,
                "betterThanACoin": ranks_above_chance(scores.version.ranking),
                "scores": [
                    {"score": score, "reward": reward}
                    for score, reward in zip(scores.scores, scores.rewards, strict=True)
                ],
            }
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\x00" not in value


def _messages(sent: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt as chat messages; of `prompt` and `messages` exactly one."""
    names = [name for name in ("prompt", "messages") if sent.get(name) is not None]
    if len(names) != 1:
        fault = "expected either prompt or messages"
        raise RequestRefused(fault, fields={"messages": fault})
    value = sent[names[0]]
    if _is_text(value) and value.strip():
        return [{"role": "user", "content": value}]
    turns = value if names[0] == "messages" and isinstance(value, list) and value else None
    if turns is None or not all(
        isinstance(turn, dict) and _is_text(turn.get("content")) and turn.get("role") in ROLES
        for turn in turns
    ):
        fault = "expected a text" if names[0] == "prompt" else "expected a text or a list of {role, content}"
        raise RequestRefused(f"{names[0]}: {fault}", fields={names[0]: fault})
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]
