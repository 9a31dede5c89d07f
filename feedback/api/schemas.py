"""OpenAPI components of request and response bodies: the validation of feedback.services in words."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension

from backend.installation import PROGRAM
from backend.rest.reading import object_in
from backend.rest.schema import Schema, add_components, list_schema, ref
from feedback.models import SLUG_PATTERN
from feedback.recording.ingest import MAX_BULK
from feedback.storage.bodies import Body, nullable
from feedback.storage.facts import COMPARISON, DECISION, OUTCOME, RATING, RATING_CONTENT, TRACE
from feedback.storage.validation import MAX_TEXT

ID: Schema = {"type": "string", "format": "uuid"}
SENT_ID: Schema = {
    "type": ["string", "null"],
    "format": "uuid",
    "description": "Your own UUID, which makes retries safe: the same id again returns the first result "
    "(200), a different body under it is 409. Generated if left out.",
}
SLUG: Schema = {"type": "string", "pattern": SLUG_PATTERN}
TIME: Schema = {"type": "string", "format": "date-time"}
SENT_TIME: Schema = {
    "type": ["string", "null"],
    "format": "date-time",
    "description": "ISO 8601, from 1970 to 2199; UTC where no zone is given",
}
JSON_OBJECT: Schema = {"type": "object", "additionalProperties": True}


def text(limit: int = MAX_TEXT, description: str = "") -> Schema:
    return {"type": "string", "maxLength": limit, **({"description": description} if description else {})}


def request_schema(required: dict[str, Schema], optional: dict[str, Schema], **more: Any) -> Schema:
    """A request's object: other fields are refused, optional ones may be null."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **{name: nullable(schema) if schema not in (SENT_ID, SENT_TIME) else schema
                                      for name, schema in optional.items()}},
        "additionalProperties": False,
        **more,
    }  # fmt: skip


def body_request_schema(
    body: Body,
    before: dict[str, Schema] | None = None,
    after: dict[str, Schema] | None = None,
    **more: Any,
) -> Schema:
    """A request's object of a declared body: beside its fields, required ones before them and optional ones after."""
    before, after = before or {}, after or {}
    fields = {field.name: field.request_schema() for field in body if field.is_sent}
    return {
        "type": "object",
        "required": [*before, *(field.name for field in body if field.is_required)],
        "properties": {**before, **fields, **after},
        "additionalProperties": False,
        **more,
    }


def body_answer_schema(body: Body, before: dict[str, Schema], after: dict[str, Schema]) -> Schema:
    """An answer's object of a declared body, between its other fields."""
    return answer_schema({**before, **{field.name: field.answer_schema() for field in body}, **after})


def answer_schema(properties: dict[str, Schema]) -> Schema:
    """An answer's object: every field is there."""
    return {
        "type": "object",
        "required": list(properties),
        "properties": properties,
        "additionalProperties": False,
    }


MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "description": "system, user, assistant, tool, ..."},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {}}, {"type": "null"}]},
    },
    "additionalProperties": True,
}
DECISION_SHOWN: Schema = body_answer_schema(
    DECISION,
    {"id": ID},
    {
        "prompt_hash": {"type": "string"},
        "trace": nullable(ID),
        "withdrawal": {
            "type": ["integer", "null"],
            "description": "Number of the withdrawal that excluded it from training",
        },
        "ratings_human": {"type": "integer", "description": "Present ratings by people"},
        "created_at": TIME,
    },
)


def with_fields(schema: Schema, more: dict[str, Schema]) -> Schema:
    return answer_schema({**schema["properties"], **more})


STORED_FLAG: Schema = {
    "type": "boolean",
    "description": "false: left out by the agent's collection_rate, for good",
}
BULK_RESULT: Schema = {
    "type": "object",
    "required": ["status"],
    "properties": {
        "status": {
            "type": "integer",
            "enum": [200, 201, 202, 400, 409],
            "description": "Status as for a single request",
        },
        "id": ID,
        "stored": STORED_FLAG,
        "error": {"$ref": "#/components/schemas/Error/properties/error"},
    },
    "additionalProperties": False,
}

COMPONENTS: dict[str, Schema] = {
    "Message": MESSAGE,
    "DecisionSent": body_request_schema(DECISION, after={"id": SENT_ID, "created_at": SENT_TIME}),
    "DecisionsSent": list_schema(
        {}, minItems=1, maxItems=MAX_BULK, description="Each a DecisionSent, and each answered on its own"
    ),
    "Decision": with_fields(DECISION_SHOWN, {"stored": STORED_FLAG}),
    "DecisionLeftOut": answer_schema({"id": ID, "stored": {**STORED_FLAG, "enum": [False]}}),
    "DecisionsAnswer": answer_schema(
        {
            "created": {"type": "integer"},
            "repeated": {"type": "integer", "description": "Recorded before, with the same body"},
            "left_out": {"type": "integer"},
            "refused": {"type": "integer"},
            "results": list_schema(BULK_RESULT, description="One per decision, in the order they were sent"),
        }
    ),
    "DecisionFound": DECISION_SHOWN,
    "DecisionWhole": with_fields(
        DECISION_SHOWN, {"ratings": list_schema(ref("Rating")), "outcomes": list_schema(ref("Outcome"))}
    ),
    "RatingSent": body_request_schema(
        RATING,
        after={"id": SENT_ID},
        description=f"At least one of {', '.join(RATING_CONTENT[:-1])} and {RATING_CONTENT[-1]}. A later rating of the "
        "same rater on the same decision supersedes the earlier one, which stays on record.",
    ),
    "Rating": body_answer_schema(
        RATING, {"id": ID, "decision": ID}, {"supersedes": nullable(ID), "created_at": TIME}
    ),
    "OutcomeSent": body_request_schema(OUTCOME, after={"id": SENT_ID}),
    "Outcome": body_answer_schema(OUTCOME, {"id": ID, "decision": ID}, {"created_at": TIME}),
    "ComparisonSent": body_request_schema(
        COMPARISON,
        before={
            "left": ID,
            "right": {**ID, "description": "Another decision of the same agent on the same prompt"},
        },
        after={"id": SENT_ID},
    ),
    "Comparison": body_answer_schema(
        COMPARISON,
        {"id": ID, "left": ID, "right": ID},
        {"supersedes": nullable(ID), "created_at": TIME},
    ),
    "TraceSent": body_request_schema(TRACE, after={"id": SENT_ID}),
    "Trace": answer_schema(
        {
            "id": ID,
            **{field.name: field.answer_schema() for field in TRACE if field.name != "metadata"},
            "steps": {"type": "integer", "description": "How many"},
            "created_at": TIME,
            "stored": STORED_FLAG,
            "decisions": list_schema(ID, description="Those that are kept"),
        }
    ),
    "FeedbackSent": request_schema(
        {
            "prompt": {**text(), "minLength": 1},
            "response": DECISION["response"].type.request_schema(),
            "score": {**RATING["score"].type.request_schema(), "description": "0 is worst, 1 is best"},
        },
        {
            "id": SENT_ID,
            "runId": DECISION["run_id"].type.request_schema(),
            "notes": RATING["notes"].type.request_schema(),
        },
    ),
    "Feedback": answer_schema(
        {"id": ID, "agentId": SLUG, "score": RATING["score"].type.request_schema(), "createdAt": TIME}
    ),
}


def fields_in(data: Any, component: str) -> dict[str, Any]:
    """The fields of a request's JSON object, null ones left out, as its component describes them. Raises
    RequestRefused (400) for other types, unknown fields, missing ones."""
    schema = COMPONENTS[component]
    return object_in(data, required=schema["required"], optional=_OPTIONAL[component])


_OPTIONAL = {
    name: tuple(field for field in schema["properties"] if field not in schema["required"])
    for name, schema in COMPONENTS.items()
    if name.endswith("Sent") and schema["type"] == "object"
}

hook = add_components(COMPONENTS)


class KeyScheme(OpenApiAuthenticationExtension):
    target_class = "feedback.accounts.authentication.KeyAuthentication"
    name = "key"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        return {
            "type": "http",
            "scheme": "bearer",
            "description": f"A key made with `{PROGRAM} api_key create NAME --scopes ...` or in the admin.",
        }


class RoleScheme(OpenApiAuthenticationExtension):
    target_class = "feedback.accounts.authentication.RoleAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        return {
            "type": "apiKey",
            "in": "cookie",
            "name": "sessionid",
            "description": "The session of a signed-in person; writes also need the X-CSRFToken header.",
        }
