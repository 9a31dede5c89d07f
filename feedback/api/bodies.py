"""Bodies of the endpoints that record: the declared facts, and what the database adds to them."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from pydantic import BeforeValidator, ConfigDict, Field, RootModel

from backend.bodies import Answer, Sent, Time
from backend.installation import PROGRAM
from backend.rest.schema import ErrorDetails, of_path
from feedback.models import SLUG_PATTERN
from feedback.recording.ingest import MAX_BULK
from feedback.storage.facts import COMPARISON, DECISION, OUTCOME, RATING, RATING_CONTENT, TRACE
from feedback.storage.fields import Json, MaybeTime, Name, Notes, Response, SaidText, SentId, Share, Uuid

SLUG = {"type": "string", "pattern": SLUG_PATTERN}
OF_AGENT = of_path("agent", SLUG, "Whose")
_SENT_ID: object = (SentId | None, None)
_OF = {name: (uuid.UUID, Field(validation_alias=f"{name}_id")) for name in ("decision", "left", "right")}
_WRITTEN: dict[str, object] = {
    "supersedes": (uuid.UUID | None, Field(validation_alias="supersedes_id")),
    "created_at": (Time, ...),
}
_ID: dict[str, object] = {"id": (uuid.UUID, ...)}
_LEFT_OUT = "false: left out by the agent's collection_rate, for good"
Stored = Annotated[bool, Field(description=_LEFT_OUT)]


def _one_of_two(schema: dict[str, Any]) -> None:
    """Either name of the prompt is required, and one alone."""
    schema["required"] = [name for name in schema["required"] if name != "messages"]
    schema["oneOf"] = [{"required": ["messages"]}, {"required": ["prompt"]}]


class DecisionSent(
    DECISION.sent(  # type: ignore[misc]
        "DecisionSent",
        id=_SENT_ID,
        created_at=(MaybeTime, None),
        prompt=(Json, Field(None, description="`messages`, under the name that files have")),
        thumb=(
            Literal["up", "down"] | None,
            Field(None, description="A rating by the caller, who needs the scope `rate`"),
        ),
    )
):
    model_config = ConfigDict(json_schema_extra=_one_of_two)


DecisionFound = DECISION.answer(
    "DecisionFound",
    _ID,
    {
        "prompt_hash": (str, ...),
        "trace": (uuid.UUID | None, Field(validation_alias="trace_id")),
        "withdrawal": (
            int | None,
            Field(
                validation_alias="withdrawal_id",
                description="Number of the withdrawal that excluded it from training",
            ),
        ),
        "ratings_human": (int, Field(description="Present ratings by people")),
        "created_at": (Time, ...),
    },
)
RatingSent = RATING.sent("RatingSent", id=_SENT_ID)
RatingSent.__doc__ = (
    f"At least one of {', '.join(RATING_CONTENT[:-1])} and {RATING_CONTENT[-1]}. A later rating of the same rater on "
    "the same decision supersedes the earlier one, which stays on record."
)
TokenRatingSent = RATING.sent("TokenRatingSent", without=("rater", "rater_kind"), id=_SENT_ID)
TokenRatingSent.__doc__ = f"At least one of {', '.join(RATING_CONTENT[:-1])} and {RATING_CONTENT[-1]}."
Rating = RATING.answer("Rating", {**_ID, "decision": _OF["decision"]}, _WRITTEN)
OutcomeSent = OUTCOME.sent("OutcomeSent", id=_SENT_ID)
Outcome = OUTCOME.answer(
    "Outcome", {**_ID, "decision": _OF["decision"]}, {"at": (Time, ...), "created_at": (Time, ...)}
)
ComparisonSent = COMPARISON.sent("ComparisonSent", left=(Uuid, ...), right=(Uuid, ...), id=_SENT_ID)
Comparison = COMPARISON.answer("Comparison", {**_ID, "left": _OF["left"], "right": _OF["right"]}, _WRITTEN)
TraceSent = TRACE.sent("TraceSent", id=_SENT_ID)


class FeedbackLinks(Answer):
    feedback_token: str
    """Lets its holder rate this decision at POST /api/feedback/{token}, and nothing else."""
    feedback_url: str
    """Page with a form for the same."""


class DecisionStored(FeedbackLinks, DecisionFound):  # type: ignore[misc, valid-type]
    stored: Stored


class DecisionWhole(DecisionFound):  # type: ignore[misc, valid-type]
    ratings: list[Rating]  # type: ignore[valid-type]
    outcomes: list[Outcome]  # type: ignore[valid-type]


class DecisionLeftOut(Answer):
    id: uuid.UUID
    stored: Literal[False] = Field(description=_LEFT_OUT)


class BulkResult(Answer):
    model_config = ConfigDict(json_schema_extra={"required": ["status"], "additionalProperties": False})

    status: Literal[200, 201, 202, 400, 409]
    """Status as for a single request."""
    id: uuid.UUID | None = None
    stored: Stored | None = None
    error: ErrorDetails | None = None


class DecisionsAnswer(Answer):
    created: int
    repeated: int
    """Recorded before, with the same body."""
    left_out: int
    refused: int
    results: list[BulkResult]
    """One per decision, in the order they were sent."""


class DecisionsSent(RootModel[DecisionSent | Annotated[list[Any], Field(min_length=1, max_length=MAX_BULK)]]):
    """A decision, or a list of them. Each is answered on its own."""


class DecisionsRecorded(RootModel[DecisionStored | DecisionsAnswer]):
    """Of a decision the decision, of a list one result each."""


class TraceStored(Answer):
    id: uuid.UUID
    agent: str
    run_id: str
    steps: Annotated[int, BeforeValidator(len)]
    """How many."""
    started_at: Time | None
    finished_at: Time | None
    created_at: Time
    stored: Stored
    decisions: list[uuid.UUID]
    """Those that are kept."""


class FeedbackSent(Sent):
    prompt: SaidText
    response: Response
    score: Share
    """0 is worst, 1 is best."""
    id: SentId | None = None
    runId: Name = ""
    notes: Notes = ""


class Feedback(Answer):
    id: uuid.UUID
    agentId: str
    score: float
    createdAt: Time = Field(validation_alias="created_at")


class KeyScheme(OpenApiAuthenticationExtension):
    target_class = "feedback.accounts.authentication.KeyAuthentication"
    name = "key"

    def get_security_definition(self, auto_schema: object) -> dict[str, object]:
        return {
            "type": "http",
            "scheme": "bearer",
            "description": f"A key made with `{PROGRAM} api_key create NAME --scopes ...` or in the admin.",
        }


class TokenScheme(OpenApiAuthenticationExtension):
    """The token in the address is all there is: no header is needed beside it."""

    target_class = "feedback.accounts.feedback_tokens.TokenAuthentication"
    name: str | list[str] = []

    def get_security_definition(self, auto_schema: object) -> list[dict[str, object]]:
        return []

    def get_security_requirement(self, auto_schema: object) -> dict[str, list[object]]:
        return {}


class RoleScheme(OpenApiAuthenticationExtension):
    target_class = "feedback.accounts.authentication.RoleAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: object) -> dict[str, object]:
        return {
            "type": "apiKey",
            "in": "cookie",
            "name": "sessionid",
            "description": "The session of a signed-in person; writes also need the X-CSRFToken header.",
        }
