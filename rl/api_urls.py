"""Addresses of the REST API of rl, below /api/."""

from __future__ import annotations

from django.urls import path

from rl.api import Policies, RunOne, TrainPolicy

urlpatterns = [
    path("policies/train_policy/<str:agent>", TrainPolicy.as_view(), name="api-train-policy"),
    path("policies/<str:agent>", Policies.as_view(), name="api-policies"),
    path("runs/<int:pk>/", RunOne.as_view(), name="api-run"),
]
