"""Addresses of the REST API of feedback, below /api/, and of its description."""

from __future__ import annotations

from django.urls import path

from backend.rest.schema import SchemaView, api_docs
from feedback.api.decisions import DecisionOne, Decisions, Traces, WithdrawalRestore, Withdrawals
from feedback.api.imports import ImportOne, Imports, ImportUndo, RatingsExport
from feedback.api.ratings import (
    Agreement,
    Comparisons,
    FeedbackSend,
    Outcomes,
    Ratings,
    Samples,
    TokenRatings,
)
from feedback.api.webhooks import OpenWebuiFeedback, SlackInteractions

urlpatterns = [
    path("decisions/", Decisions.as_view(), name="api-decisions"),
    path("decisions/<uuid:pk>/", DecisionOne.as_view(), name="api-decision"),
    path("decisions/<uuid:pk>/ratings/", Ratings.as_view(), name="api-ratings"),
    path("decisions/<uuid:pk>/outcomes/", Outcomes.as_view(), name="api-outcomes"),
    path("withdrawals/", Withdrawals.as_view(), name="api-withdrawals"),
    path("withdrawals/<int:pk>/restore/", WithdrawalRestore.as_view(), name="api-withdrawal-restore"),
    path("comparisons/", Comparisons.as_view(), name="api-comparisons"),
    path("traces/", Traces.as_view(), name="api-traces"),
    path("policies/feedback/<str:agent>", FeedbackSend.as_view(), name="api-feedback"),
    path("feedback/<str:token>", TokenRatings.as_view(), name="api-feedback-token"),
    path("imports/", Imports.as_view(), name="api-imports"),
    path("imports/<int:pk>/", ImportOne.as_view(), name="api-import"),
    path("imports/<int:pk>/undo/", ImportUndo.as_view(), name="api-import-undo"),
    path("ratings/export/", RatingsExport.as_view(), name="api-export"),
    path("samples/", Samples.as_view(), name="api-samples"),
    path("agreement/", Agreement.as_view(), name="api-agreement"),
    path("webhooks/slack/", SlackInteractions.as_view(), name="api-webhook-slack"),
    path("webhooks/open-webui/", OpenWebuiFeedback.as_view(), name="api-webhook-open-webui"),
    path("schema/", SchemaView.as_view(), name="api-schema"),
    path("docs/", api_docs, name="api-docs"),
]
