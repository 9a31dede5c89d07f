"""Withdrawals over REST: withdraw decisions, list withdrawals, restore them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Sent, Time
from backend.rest.access import grant_of
from backend.rest.errors import RequestRefused
from backend.rest.pages import PageQuery, page_of
from backend.rest.reading import body_read, query_read
from backend.rest.schema import Page, describe
from backend.rest.views import ApiView
from feedback.erasure.withdrawals import (
    WithdrawalSelection,
    Withdrawn,
    decisions_withdraw,
    withdrawal_restore,
    withdrawals,
)
from feedback.storage.fields import Storable, Uuid


class WithdrawalSent(WithdrawalSelection):
    ids: Annotated[list[Uuid], Field(max_length=1000)] = []
    reason: Annotated[Storable, Field(max_length=500)] = ""
    """Why, for the record."""
    dry_run: bool = False
    """Count and list; withdraw nothing."""


class WithdrawalShown(Answer):
    id: int
    selection: dict[str, Any]
    reason: str
    actor: str
    decisions: int = Field(validation_alias="decisions_count")
    trained_on: dict[str, Any]
    created_at: Time
    restored_at: Time | None
    restored_by: str


class WithdrawalRestored(Answer):
    withdrawal: int
    decisions: int


class Withdrawals(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "List the withdrawals, newest first",
        {200: ("A page of them", Page[WithdrawalShown])},
        query=PageQuery,
        tag="decisions",
        operation="withdrawals_list",
    )
    def get(self, request: Request) -> Response:
        page = query_read(PageQuery, request)
        return Response(page_of(withdrawals(), request, page, WithdrawalShown.of))

    @describe(
        "Withdraw decisions",
        {201: ("Withdrawn", Withdrawn), 200: ("Nothing to withdraw; or a dry run", Withdrawn)},
        body=WithdrawalSent,
        tag="decisions",
        operation="decisions_withdraw",
        description="Decisions that match all given fields are excluded from datasets, queues, counts and "
        "exports. They stay on record and can be restored. Runs and policies trained on them "
        "are listed and not changed.",
    )
    def post(self, request: Request) -> Response:
        sent = body_read(WithdrawalSent, request.data)
        done = decisions_withdraw(
            sent, actor=grant_of(request).holder, reason=sent.reason, dry_run=sent.dry_run
        )
        return Response(Withdrawn.of(done), status=200 if done.withdrawal is None else 201)


class WithdrawalRestore(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Undo a withdrawal",
        {200: ("How many came back", WithdrawalRestored)},
        body=Sent,
        refusals=(404, 409),
        tag="decisions",
        operation="withdrawals_restore",
        description="409 where it was restored already.",
    )
    def post(self, request: Request, pk: int) -> Response:
        body_read(Sent, request.data)
        if pk >= 2**63:
            raise RequestRefused(f"there is no withdrawal {pk}", code="not_found", status=404)
        back = withdrawal_restore(pk, actor=grant_of(request).holder)
        return Response({"withdrawal": pk, "decisions": back})
