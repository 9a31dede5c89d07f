"""Addresses of this application."""

from __future__ import annotations

from django.urls import path

from rl import agent_views, experiment_views, policy_views, views

urlpatterns = [
    path("", views.home, name="home"),
    path("agents/<str:slug>/", agent_views.agent, name="agent"),
    path("runs/", views.runs, name="runs"),
    path("runs/<int:pk>/", views.run, name="run"),
    path("runs/<int:pk>/cancel/", views.run_cancel, name="run-cancel"),
    path("experiments/", experiment_views.experiments, name="experiments"),
    path("experiments/new/", experiment_views.experiment_new, name="experiment-new"),
    path("experiments/<int:pk>/", experiment_views.experiment, name="experiment"),
    path("experiments/<int:pk>/change/", experiment_views.experiment_change, name="experiment-change"),
    path("policies/", policy_views.policies, name="policies"),
    path("policies/compare/", policy_views.policies_compared, name="policies-compared"),
    path("policies/<str:name>/", policy_views.policy, name="policy"),
    path("policies/<str:name>/move/", policy_views.policy_move, name="policy-move"),
]
