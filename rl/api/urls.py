"""Addresses of rl: the REST API below /api/, the gateway below /v1/, and who watches the program."""

from __future__ import annotations

from django.urls import include, path

from feedback.api.telemetry import OtlpLogs, OtlpTraces
from rl.api.experiments import ExperimentResults, Experiments
from rl.api.fine_tuning import (
    FileContent,
    FileOne,
    Files,
    JobCancel,
    JobCheckpoints,
    JobEvents,
    JobOne,
    Jobs,
)
from rl.api.gateway import (
    ChatCompletions,
    Decide,
    Embeddings,
    MessagesCreate,
    ModelOne,
    Models,
    ResponsesCreate,
)
from rl.api.health import Metrics, healthz, readyz
from rl.api.judging import JudgingPairs, JudgingRoundOne, JudgingRounds, JudgingStop
from rl.api.loop import CalculatePending, Cancel, Evaluated, Online, Promote, Registry, Rollback, Runs
from rl.api.mcp import Mcp
from rl.api.training import AgentBaseModel, Policies, RunOne, TrainPolicy
from rl.api.upstreams import UpstreamOne, Upstreams, UpstreamTested

API = [
    path("agents/<str:agent>/base-model/", AgentBaseModel.as_view(), name="api-agent-base-model"),
    path("decide/", Decide.as_view(), name="api-decide"),
    path("policies/train_policy/<str:agent>", TrainPolicy.as_view(), name="api-train-policy"),
    path("policies/<str:agent>", Policies.as_view(), name="api-policies"),
    path("policies/", Registry.as_view(), name="api-registry"),
    path("policies/<str:name>/promote/", Promote.as_view(), name="api-promote"),
    path("policies/<str:name>/evaluate/", Evaluated.as_view(), name="api-evaluate"),
    path("policies/<str:name>/rollback/", Rollback.as_view(), name="api-rollback"),
    path("experiments/", Experiments.as_view(), name="api-experiments"),
    path("experiments/<int:pk>/results/", ExperimentResults.as_view(), name="api-experiment-results"),
    path("judging-rounds/", JudgingRounds.as_view(), name="api-judging-rounds"),
    path("judging-rounds/<int:pk>/", JudgingRoundOne.as_view(), name="api-judging-round"),
    path("judging-rounds/<int:pk>/stop/", JudgingStop.as_view(), name="api-judging-stop"),
    path("judging-rounds/<int:pk>/pairs/", JudgingPairs.as_view(), name="api-judging-pairs"),
    path("runs/", Runs.as_view(), name="api-runs"),
    path("runs/<int:pk>/cancel/", Cancel.as_view(), name="api-run-cancel"),
    path("online/<str:agent>/", Online.as_view(), name="api-online"),
    path("training/calculate-pending", CalculatePending.as_view(), name="api-calculate-pending"),
    path("upstreams/", Upstreams.as_view(), name="api-upstreams"),
    path("upstreams/<str:name>/", UpstreamOne.as_view(), name="api-upstream"),
    path("upstreams/<str:name>/test/", UpstreamTested.as_view(), name="api-upstream-test"),
    path("runs/<int:pk>/", RunOne.as_view(), name="api-run"),
]

GATEWAY = [
    path("chat/completions", ChatCompletions.as_view(), name="v1-chat-completions"),
    path("responses", ResponsesCreate.as_view(), name="v1-responses"),
    path("messages", MessagesCreate.as_view(), name="v1-messages"),
    path("embeddings", Embeddings.as_view(), name="v1-embeddings"),
    path("traces", OtlpTraces.as_view(), name="v1-traces"),
    path("logs", OtlpLogs.as_view(), name="v1-logs"),
    path("models", Models.as_view(), name="v1-models"),
    path("models/<path:name>", ModelOne.as_view(), name="v1-model"),
    path("files", Files.as_view(), name="v1-files"),
    path("files/<str:name>", FileOne.as_view(), name="v1-file"),
    path("files/<str:name>/content", FileContent.as_view(), name="v1-file-content"),
    path("fine_tuning/jobs", Jobs.as_view(), name="v1-fine-tuning-jobs"),
    path("fine_tuning/jobs/<str:name>", JobOne.as_view(), name="v1-fine-tuning-job"),
    path("fine_tuning/jobs/<str:name>/cancel", JobCancel.as_view(), name="v1-fine-tuning-cancel"),
    path("fine_tuning/jobs/<str:name>/events", JobEvents.as_view(), name="v1-fine-tuning-events"),
    path(
        "fine_tuning/jobs/<str:name>/checkpoints", JobCheckpoints.as_view(), name="v1-fine-tuning-checkpoints"
    ),
]

urlpatterns = [
    path("api/", include(API)),
    path("v1/", include(GATEWAY)),
    path("mcp", Mcp.as_view(), name="mcp"),
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("metrics", Metrics.as_view(), name="metrics"),
]
