"""OpenAPI components of request and response bodies: the validation of feedback.services in words."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension

from backend.rest.schema import Schema, add_components, listed, ref
from feedback.models import SLUG_PATTERN
from feedback.recording.ingest import MAX_BULK
from feedback.recording.traces import STEP_KINDS
from feedback.storage.validation import MAX_TAG, MAX_TAGS, MAX_TEXT

ID: Schema = {"type": "string", "format": "uuid"}
SENT_ID: Schema = {
    "type": ["string", "null"],
    "format": "uuid",
    "description": "Yours, so that a retry is the same write: the same id again returns the first result (200), "
    "another body under it is 409. Left out, one is made.",
}
SLUG: Schema = {"type": "string", "pattern": SLUG_PATTERN}
TIME: Schema = {"type": "string", "format": "date-time"}
SENT_TIME: Schema = {
    "type": ["string", "null"],
    "format": "date-time",
    "description": "ISO 8601, from 1970 to 2199; UTC where no zone is given",
}
JSON_OBJECT: Schema = {"type": "object", "additionalProperties": True}
TAGS: Schema = {"type": "array", "items": {"type": "string", "maxLength": MAX_TAG}, "maxItems": MAX_TAGS}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}


def text(limit: int = MAX_TEXT, description: str = "") -> Schema:
    return {"type": "string", "maxLength": limit, **({"description": description} if description else {})}


def maybe(schema: Schema) -> Schema:
    """The same, or null, which a request may send for what it does not say."""
    if "type" not in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    return {
        **schema,
        "type": [schema["type"], "null"],
        **({"enum": [*schema["enum"], None]} if "enum" in schema else {}),
    }


def sent(required: dict[str, Schema], optional: dict[str, Schema], **more: Any) -> Schema:
    """A request's object: other fields are refused, optional ones may be null."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **{name: maybe(schema) if schema not in (SENT_ID, SENT_TIME) else schema
                                      for name, schema in optional.items()}},
        "additionalProperties": False,
        **more,
    }  # fmt: skip


def answered(properties: dict[str, Schema]) -> Schema:
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
MESSAGES: Schema = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_TEXT, "description": "One turn of the user"},
        {"type": "array", "items": ref("Message"), "minItems": 1},
    ],
    "description": "The prompt: chat messages, or one text. At most 1,000,000 characters as JSON.",
}
CANDIDATES: Schema = {
    "type": "array",
    "description": "The listed options it was chosen among",
    "items": {
        "anyOf": [
            {"type": "string", "maxLength": MAX_TEXT},
            {
                "type": "object",
                "required": ["response"],
                "properties": {"response": {"type": "string"}, "score": maybe(SHARE)},
                "additionalProperties": True,
            },
        ]
    },
}
DECISION_OPTIONAL: dict[str, Schema] = {
    "id": SENT_ID,
    "state": {"description": "What the app knew when it asked: any JSON"},
    "candidates": CANDIDATES,
    "policy": text(200, "Name of the policy that answered"),
    "unit": text(200, "The user or session it was decided for; `forget` removes by it"),
    "arm": text(200),
    "propensity": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 1,
        "description": "Probability of the choice",
    },
    "run_id": text(200, "The app's own id of the run"),
    "latency_ms": {"type": "number", "minimum": 0, "maximum": 1e12},
    "tokens_in": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "tokens_out": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "tags": TAGS,
    "metadata": JSON_OBJECT,
    "created_at": SENT_TIME,
}
RATING_OPTIONAL: dict[str, Schema] = {
    "id": SENT_ID,
    "thumb": {"type": "string", "enum": ["up", "down"]},
    "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    "score": SHARE,
    "correction": {**text(description="The response it should have been"), "minLength": 1},
    "tags": TAGS,
    "notes": text(20_000),
    "rater": {
        **text(200, "Who rated; the key's name where left out. Signed in, one rates as oneself."),
        "minLength": 1,
    },
    "rater_kind": {"type": "string", "enum": ["human", "simulated"], "default": "human"},
}

DECISION: Schema = answered(
    {
        "id": ID,
        "agent": SLUG,
        "messages": listed(ref("Message")),
        "response": {"type": "string"},
        "state": {},
        "candidates": {"anyOf": [listed({}), {"type": "null"}]},
        "policy": {"type": "string"},
        "unit": {"type": "string"},
        "arm": {"type": "string"},
        "propensity": {"type": ["number", "null"]},
        "run_id": {"type": "string"},
        "latency_ms": {"type": ["number", "null"]},
        "tokens_in": {"type": ["integer", "null"]},
        "tokens_out": {"type": ["integer", "null"]},
        "tags": TAGS,
        "metadata": JSON_OBJECT,
        "source": {"type": "string"},
        "prompt_hash": {"type": "string"},
        "trace": {"type": ["string", "null"], "format": "uuid"},
        "withdrawal": {
            "type": ["integer", "null"],
            "description": "Number of the withdrawal that took it out of what is learnt from",
        },
        "ratings_human": {"type": "integer", "description": "Ratings by people that stand"},
        "created_at": TIME,
    }
)
RATING: Schema = answered(
    {
        "id": ID,
        "decision": ID,
        "rater": {"type": "string"},
        "rater_kind": {"type": "string", "enum": ["human", "simulated"]},
        "thumb": {"type": ["string", "null"], "enum": ["up", "down", None]},
        "stars": {"type": ["integer", "null"]},
        "score": {"type": ["number", "null"]},
        "correction": {"type": ["string", "null"]},
        "tags": TAGS,
        "notes": {"type": "string"},
        "supersedes": {"type": ["string", "null"], "format": "uuid"},
        "created_at": TIME,
    }
)
OUTCOME: Schema = answered(
    {"id": ID, "decision": ID, "name": SLUG, "value": {"type": "number"}, "at": TIME, "created_at": TIME}
)


def with_fields(schema: Schema, more: dict[str, Schema]) -> Schema:
    return answered({**schema["properties"], **more})


STORED: Schema = {
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
            "description": "As if it had been sent alone",
        },
        "id": ID,
        "stored": STORED,
        "error": {"$ref": "#/components/schemas/Error/properties/error"},
    },
    "additionalProperties": False,
}

COMPONENTS: dict[str, Schema] = {
    "Message": MESSAGE,
    "DecisionSent": sent(
        {
            "agent": SLUG,
            "messages": MESSAGES,
            "response": text(description="The answer exactly as it was given"),
        },
        DECISION_OPTIONAL,
    ),
    "DecisionsSent": listed(
        {}, minItems=1, maxItems=MAX_BULK, description="Each a DecisionSent, and each answered on its own"
    ),
    "Decision": with_fields(DECISION, {"stored": STORED}),
    "DecisionLeftOut": answered({"id": ID, "stored": {**STORED, "enum": [False]}}),
    "DecisionsAnswer": answered(
        {
            "created": {"type": "integer"},
            "repeated": {"type": "integer", "description": "Recorded before, with the same body"},
            "left_out": {"type": "integer"},
            "refused": {"type": "integer"},
            "results": listed(BULK_RESULT, description="One per decision, in the order they were sent"),
        }
    ),
    "DecisionFound": DECISION,
    "DecisionWhole": with_fields(
        DECISION, {"ratings": listed(ref("Rating")), "outcomes": listed(ref("Outcome"))}
    ),
    "RatingSent": sent(
        {},
        RATING_OPTIONAL,
        description="At least one of thumb, stars, score, correction, tags and notes. A later rating of the same "
        "rater on the same decision supersedes the earlier one, which stays on record.",
    ),
    "Rating": RATING,
    "OutcomeSent": sent(
        {
            "name": {**SLUG, "description": "Such as ticket_reopened"},
            "value": {
                "anyOf": [{"type": "number"}, {"type": "boolean"}],
                "description": "true is 1, false is 0",
            },
        },
        {"id": SENT_ID, "at": SENT_TIME},
    ),
    "Outcome": OUTCOME,
    "ComparisonSent": sent(
        {
            "left": ID,
            "right": {**ID, "description": "Another decision of the same agent on the same prompt"},
            "preference": {"type": "string", "enum": ["left", "right", "tie", "both_bad"]},
        },
        {name: RATING_OPTIONAL[name] for name in ("id", "tags", "notes", "rater", "rater_kind")},
    ),
    "Comparison": answered(
        {
            "id": ID,
            "left": ID,
            "right": ID,
            "preference": {"type": "string", "enum": ["left", "right", "tie", "both_bad"]},
            **{
                name: RATING["properties"][name]
                for name in ("rater", "rater_kind", "tags", "notes", "supersedes")
            },
            "created_at": TIME,
        }
    ),
    "TraceSent": sent(
        {
            "agent": SLUG,
            "steps": listed(
                {
                    "type": "object",
                    "required": ["kind"],
                    "properties": {
                        "kind": {"type": "string", "enum": list(STEP_KINDS)},
                        "name": {"type": ["string", "null"], "maxLength": 1000},
                        "at": SENT_TIME,
                        "duration_ms": {"type": ["number", "null"], "minimum": 0, "maximum": 1e12},
                    },
                    "additionalProperties": True,
                    "description": "A step of kind decision has messages and response and becomes a decision; "
                    "without an id of its own it gets UUIDv5(trace, index).",
                },
                description="In the order they happened; at most 1,000,000 characters as JSON",
            ),
        },
        {
            "id": SENT_ID,
            "run_id": text(200),
            "started_at": SENT_TIME,
            "finished_at": SENT_TIME,
            "metadata": JSON_OBJECT,
        },
    ),
    "Trace": answered(
        {
            "id": ID,
            "agent": SLUG,
            "run_id": {"type": "string"},
            "steps": {"type": "integer", "description": "How many"},
            "started_at": {"type": ["string", "null"], "format": "date-time"},
            "finished_at": {"type": ["string", "null"], "format": "date-time"},
            "created_at": TIME,
            "stored": STORED,
            "decisions": listed(ID, description="Those that are kept"),
        }
    ),
    "FeedbackSent": sent(
        {
            "prompt": {**text(), "minLength": 1},
            "response": text(),
            "score": {**SHARE, "description": "0 is worst, 1 is best"},
        },
        {"id": SENT_ID, "runId": text(200), "notes": text(20_000)},
    ),
    "Feedback": answered({"id": ID, "agentId": SLUG, "score": SHARE, "createdAt": TIME}),
}

hook = add_components(COMPONENTS)


class KeyScheme(OpenApiAuthenticationExtension):
    target_class = "feedback.accounts.authentication.KeyAuthentication"
    name = "key"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        return {
            "type": "http",
            "scheme": "bearer",
            "description": "A key made with `manage.py api_key create NAME --scopes ...` or in the admin.",
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
