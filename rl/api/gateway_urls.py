"""Addresses of the OpenAI-compatible gateway, below /v1/."""

from __future__ import annotations

from django.urls import path

from rl.api.gateway import ChatCompletions, ModelOne, Models

urlpatterns = [
    path("chat/completions", ChatCompletions.as_view(), name="v1-chat-completions"),
    path("models", Models.as_view(), name="v1-models"),
    path("models/<path:name>", ModelOne.as_view(), name="v1-model"),
]
