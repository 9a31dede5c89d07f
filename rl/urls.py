"""Addresses of this application."""

from __future__ import annotations

from django.urls import path

from rl.views import (
    agents,
    experiments,
    flywheel,
    judging,
    playground,
    policies,
    runs,
    start,
    upstreams,
)

urlpatterns = [
    path("", runs.home, name="home"),
    path("start/", start.start, name="start"),
    path("start/connect/", start.start_connect, name="start-connect"),
    path("start/key/", start.start_key, name="start-key"),
    path("start/bring/", start.start_bring, name="start-bring"),
    path("start/take/", start.start_take, name="start-take"),
    path("agents/<str:slug>/", agents.agent, name="agent"),
    path("agents/<str:slug>/base-model/", agents.agent_base, name="agent-base"),
    path("agents/<str:slug>/sample/", agents.agent_sample, name="agent-sample"),
    path("agents/<str:slug>/rewards/", agents.agent_rewards, name="agent-rewards"),
    path("agents/<str:slug>/playground/", playground.playground, name="playground"),
    path("agents/<str:slug>/playground/rate/", playground.playground_rate, name="playground-rate"),
    path("agents/<str:slug>/flywheel/", flywheel.flywheel_page, name="flywheel"),
    path("agents/<str:slug>/flywheel/step/", flywheel.step, name="flywheel-step"),
    path("runs/", runs.runs, name="runs"),
    path("runs/compare/", runs.runs_compared, name="runs-compared"),
    path("runs/new/", runs.run_new, name="run-new"),
    path("runs/<int:pk>/", runs.run, name="run"),
    path("runs/<int:pk>/cancel/", runs.run_cancel, name="run-cancel"),
    path("runs/<int:pk>/resume/", runs.run_resume, name="run-resume"),
    path("savings/", flywheel.savings, name="savings"),
    path("experiments/", experiments.experiments, name="experiments"),
    path("experiments/new/", experiments.experiment_new, name="experiment-new"),
    path("experiments/<int:pk>/", experiments.experiment, name="experiment"),
    path("experiments/<int:pk>/change/", experiments.experiment_change, name="experiment-change"),
    path("upstreams/", upstreams.upstreams, name="upstreams"),
    path("upstreams/<str:name>/", upstreams.upstream_act, name="upstream"),
    path("policies/", policies.policies, name="policies"),
    path("policies/compare/", policies.policies_compared, name="policies-compared"),
    path("policies/<str:name>/", policies.policy, name="policy"),
    path("policies/<str:name>/answers/", policies.policy_answers, name="policy-answers"),
    path("policies/<str:name>/files/<int:pk>/", policies.policy_file, name="policy-file"),
    path("policies/<str:name>/follow-up/", policies.policy_follow_up, name="policy-follow-up"),
    path("policies/<str:name>/judge/", judging.policy_judge, name="policy-judge"),
    path("judging/<int:pk>/", judging.judging_round, name="judging-round"),
    path("judging/<int:pk>/stop/", judging.judging_stop, name="judging-stop"),
    path("policies/<str:name>/move/", policies.policy_move, name="policy-move"),
]
