"""Addresses of this application."""

from __future__ import annotations

from django.urls import path

from rl.views import agents, experiments, policies, runs

urlpatterns = [
    path("", runs.home, name="home"),
    path("agents/<str:slug>/", agents.agent, name="agent"),
    path("runs/", runs.runs, name="runs"),
    path("runs/new/", runs.run_new, name="run-new"),
    path("runs/<int:pk>/", runs.run, name="run"),
    path("runs/<int:pk>/cancel/", runs.run_cancel, name="run-cancel"),
    path("experiments/", experiments.experiments, name="experiments"),
    path("experiments/new/", experiments.experiment_new, name="experiment-new"),
    path("experiments/<int:pk>/", experiments.experiment, name="experiment"),
    path("experiments/<int:pk>/change/", experiments.experiment_change, name="experiment-change"),
    path("policies/", policies.policies, name="policies"),
    path("policies/compare/", policies.policies_compared, name="policies-compared"),
    path("policies/<str:name>/", policies.policy, name="policy"),
    path("policies/<str:name>/move/", policies.policy_move, name="policy-move"),
]
