"""Addresses for whoever watches the program: alive, ready, counters."""

from __future__ import annotations

from django.urls import path

from rl.api.health import Metrics, healthz, readyz

urlpatterns = [
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("metrics", Metrics.as_view(), name="metrics"),
]
