"""The REST endpoints of reward models: the list of them, and scores of responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, CamelAnswer, CamelSent, Time
from backend.rest.errors import RequestRefused
from backend.rest.pages import page_of
from backend.rest.reading import body_read, query_read
from backend.rest.schema import Page, describe
from backend.rest.views import ApiView
from feedback.storage.fields import SaidText, Slug, Storable
from rl.api.loop import AgentPageQuery
from rl.evaluation.scorer import MAX_CHARS, MAX_RESPONSES, ScorerAway, responses_score
from rl.models import RewardModelVersion
from rl.reward_models.service import ranks_above_chance


class RewardModel(Answer):
    name: str
    agent: str
    stage: Literal["candidate", "champion", "retired", "rejected"]
    run: int | None = Field(validation_alias="run_id")
    base_model: str
    objective: Literal["pairwise", "regression", "binary"]
    architecture: str
    feedback_count: int
    ranking: dict[str, Any]
    """Share of held-out feedback ranked as people did: value, low, high, n, what, compared."""
    better_than_a_coin: bool
    created_at: Time


class Turn(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Storable


Said: TypeAlias = Annotated[
    Annotated[SaidText, Tag("<text>")] | Annotated[list[Turn], Field(min_length=1), Tag("<list>")],
    Discriminator(
        lambda value: "<list>" if isinstance(value, list) else "<text>",
        custom_error_type="messages",
        custom_error_message="expected a text or a list of messages",
    ),
]


class ScoreSent(CamelSent):
    agent: Slug
    prompt: SaidText | None = None
    """One turn of the user."""
    messages: Said | None = None
    """Chat messages instead of a prompt."""
    responses: Annotated[list[Storable], Field(min_length=1, max_length=MAX_RESPONSES)]
    reward_model: Storable = ""
    """A version; the agent's champion where left out."""

    @property
    def turns(self) -> list[dict[str, str]]:
        """The prompt as chat messages; of `prompt` and `messages` exactly one."""
        if (self.prompt is None) == (self.messages is None):
            fault = "expected either prompt or messages"
            raise RequestRefused(fault, fields={"messages": fault})
        said = self.messages or self.prompt
        if not isinstance(said, list):
            return [{"role": "user", "content": said or ""}]
        return [{"role": turn.role, "content": turn.content} for turn in said]


class ScoreShown(CamelAnswer):
    score: float
    """Any real, comparable within one reward model."""
    reward: Annotated[float, Field(ge=-2, le=2)]


class Scores(CamelAnswer):
    agent: str
    reward_model: str
    """Which one scored."""
    objective: str
    better_than_a_coin: bool
    """On held-out feedback."""
    scores: list[ScoreShown]


def reward_model_represent(version: RewardModelVersion) -> dict[str, Any]:
    """A reward model as commands and the API answer it."""
    return RewardModel.of(version, better_than_a_coin=ranks_above_chance(version.ranking))


class RewardModels(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "List reward models, newest first",
        {200: ("A page of them", Page[RewardModel])},
        query=AgentPageQuery,
        tag="rewards",
        operation="reward_models_list",
    )
    def get(self, request: Request) -> Response:
        sent = query_read(AgentPageQuery, request)
        found = RewardModelVersion.objects.order_by("-pk")
        if sent.agent:
            found = found.filter(agent=sent.agent)
        return Response(page_of(found, request, sent, reward_model_represent))


class ScorerUnavailable(RequestRefused):
    """No scorer answers now."""

    def __init__(self, error: ScorerAway) -> None:
        self.wait = error.retry_after_s
        super().__init__(f"{error}; try again in {self.wait} s", code="unavailable", status=503)


class Score(ApiView):
    scopes = {"POST": "ingest"}

    @describe(
        "Score responses with a reward model",
        {200: ("A score for each response", Scores)},
        body=ScoreSent,
        refusals=(404, 409),
        tag="rewards",
        operation="responses_score",
        description=f"`prompt` or `messages`; 1 to {MAX_RESPONSES} responses, {MAX_CHARS:,} characters in "
        "all. The first call after a pause waits for the model to load, or gets 503 with "
        "Retry-After.",
    )
    def post(self, request: Request) -> Response:
        sent = body_read(ScoreSent, request.data)
        try:
            found = responses_score(sent.agent, sent.turns, sent.responses, sent.reward_model)
        except ScorerAway as error:
            raise ScorerUnavailable(error) from error
        scores = [
            {"score": score, "reward": reward}
            for score, reward in zip(found.scores, found.rewards, strict=True)
        ]
        return Response(
            Scores.of(
                found.version,
                reward_model=found.version.name,
                better_than_a_coin=ranks_above_chance(found.version.ranking),
                scores=scores,
            )
        )
