"""Withdrawals over REST: withdraw decisions, list withdrawals, restore them."""

from __future__ import annotations

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.access import grant_of
from backend.rest.errors import RequestRefused
from backend.rest.pages import MAX_PAGE_SIZE, PAGE_SIZE, page_of
from backend.rest.pages import PARAMETERS as PAGE_PARAMETERS
from backend.rest.reading import object_in, parameters
from backend.rest.schema import Schema, describe, list_schema, page_schema, parameter
from backend.rest.views import ApiView
from feedback.api.schemas import JSON_OBJECT, SLUG, TIME, answer_schema, request_schema, text
from feedback.erasure.withdrawals import decisions_withdraw, selection_read, withdrawal_restore, withdrawals
from feedback.models import Withdrawal
from feedback.storage.validation import Check

COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "integer", "minimum": 1}
MOST_IDS = 1000
"""Decisions that one request names."""

SELECTION: dict[str, Schema] = {
    "ids": {"type": "array", "items": {"type": "string", "format": "uuid"}, "maxItems": MOST_IDS},
    "batch": {**NUMBER, "description": "Brought by the import of this number"},
    "agent": {**SLUG, "description": "Of this agent"},
    "unit": text(200, "Decided for this unit, exactly as the app sent it"),
    "source": text(40, "From this source: app, gateway, decide, simulation, or a format"),
    "since": {**TIME, "description": "Recorded at or after"},
    "until": {**TIME, "description": "Recorded before"},
}
ORDER_FIELDS: dict[str, Schema] = {
    "reason": text(500, "Why, for the record"),
    "dry_run": {"type": "boolean", "description": "Count and list; withdraw nothing"},
}
WITHDRAWAL_RESULT: Schema = answer_schema(
    {
        "withdrawal": {
            "type": ["integer", "null"],
            "description": "Its number; null where nothing was withdrawn",
        },
        "dry_run": {"type": "boolean"},
        "decisions": COUNT,
        "ids": list_schema({"type": "string", "format": "uuid"}),
        "agents": {"type": "object", "additionalProperties": COUNT},
        "trained_on": {**JSON_OBJECT, "description": "{runs, policies, labels, snapshots, evaluations}"},
    }
)
ROW: Schema = answer_schema(
    {
        "id": NUMBER,
        "selection": JSON_OBJECT,
        "reason": {"type": "string"},
        "actor": {"type": "string"},
        "decisions": COUNT,
        "trained_on": JSON_OBJECT,
        "created_at": TIME,
        "restored_at": {"type": ["string", "null"], "format": "date-time"},
        "restored_by": {"type": "string"},
    }
)


def withdrawal_represent(row: Withdrawal) -> dict[str, Any]:
    return {
        "id": row.pk,
        "selection": row.selection,
        "reason": row.reason,
        "actor": row.actor,
        "decisions": row.decisions_count,
        "trained_on": row.trained_on,
        "created_at": row.created_at.isoformat(),
        "restored_at": row.restored_at and row.restored_at.isoformat(),
        "restored_by": row.restored_by,
    }


class Withdrawals(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "List the withdrawals, newest first",
        {200: ("A page of them", page_schema(ROW))},
        parameters=(
            parameter("cursor", {"type": "string"}, "Where to go on: from next or previous of an answer"),
            parameter(
                "page_size",
                {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE, "default": PAGE_SIZE},
                "Rows",
            ),
        ),
        tag="decisions",
        operation="withdrawals_list",
    )
    def get(self, request: Request) -> Response:
        parameters(request, PAGE_PARAMETERS)
        return Response(page_of(withdrawals(), request, withdrawal_represent))

    @describe(
        "Withdraw decisions",
        {
            201: ("Withdrawn", WITHDRAWAL_RESULT),
            200: ("Nothing to withdraw; or a dry run", WITHDRAWAL_RESULT),
        },
        body=request_schema({}, SELECTION | ORDER_FIELDS),
        tag="decisions",
        operation="decisions_withdraw",
        description="Decisions that match all given fields are excluded from datasets, queues, counts and "
        "exports. They stay on record and can be restored. Runs and policies trained on them "
        "are listed and not changed.",
    )
    def post(self, request: Request) -> Response:
        body = object_in(request.data, required=(), optional=(*SELECTION, *ORDER_FIELDS))
        check = Check()
        if not isinstance(body.get("ids", []), list):
            check.fields["ids"] = "expected a list of UUIDs"
        elif len(body.get("ids", [])) > MOST_IDS:
            check.fields["ids"] = f"expected at most {MOST_IDS:,} UUIDs, found {len(body['ids']):,}"
        for name, wanted in (("agent", "an agent"), ("since", "a time"), ("until", "a time")):
            if body.get(name) == "":
                check.fields[name] = (
                    f"expected {wanted}, found an empty text; leave it out to select by other facts"
                )
        reason = check.text("reason", body.get("reason", ""), limit=500)
        dry_run = body.get("dry_run", False)
        if not isinstance(dry_run, bool):
            check.fields["dry_run"] = "expected true or false"
        check.raise_faults("withdrawal")
        done = decisions_withdraw(
            selection_read(body), actor=grant_of(request).holder, reason=reason, dry_run=dry_run
        )
        return Response(done.as_dict(), status=200 if done.withdrawal is None else 201)


class WithdrawalRestore(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Undo a withdrawal",
        {200: ("How many came back", answer_schema({"withdrawal": NUMBER, "decisions": COUNT}))},
        body=request_schema({}, {}),
        refusals=(404, 409),
        tag="decisions",
        operation="withdrawals_restore",
        body_required=False,
        description="409 where it was restored already.",
    )
    def post(self, request: Request, pk: int) -> Response:
        object_in(request.data, required=(), optional=())
        if pk >= 2**63:
            raise RequestRefused(f"there is no withdrawal {pk}", code="not_found", status=404)
        return Response(
            {"withdrawal": pk, "decisions": withdrawal_restore(pk, actor=grant_of(request).holder)}
        )
