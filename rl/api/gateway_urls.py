"""Addresses of the gateway, below /v1/: OpenAI's and Anthropic's."""

from __future__ import annotations

from django.urls import path

from rl.api.gateway import ChatCompletions, MessagesCreate, ModelOne, Models, ResponsesCreate

urlpatterns = [
    path("chat/completions", ChatCompletions.as_view(), name="v1-chat-completions"),
    path("responses", ResponsesCreate.as_view(), name="v1-responses"),
    path("messages", MessagesCreate.as_view(), name="v1-messages"),
    path("models", Models.as_view(), name="v1-models"),
    path("models/<path:name>", ModelOne.as_view(), name="v1-model"),
]
