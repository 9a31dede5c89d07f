"""Navigation of the admin: groups of lists for its sidebar and first page, each with a description."""

from __future__ import annotations

from typing import Any

from django.urls import reverse_lazy


def _item(name: str, title: str, icon: str, about: str) -> dict[str, Any]:
    """A list of the admin for people who may view its model. `about` is shown on the first page."""
    app, _, model = name.rpartition("_")
    return {
        "title": title,
        "icon": icon,
        "about": about,
        "link": reverse_lazy(f"admin:{name}_changelist"),
        "permission": lambda request: request.user.has_perm(f"{app}.view_{model}"),
    }


def _group(title: str, about: str, *items: dict[str, Any]) -> dict[str, Any]:
    return {"title": title, "about": about, "items": list(items)}


NAVIGATION: list[dict[str, Any]] = [
    _group(
        "Policies",
        "What was trained, how it was judged, and which policy answers. Promote, roll back and retire here.",
        _item("rl_policy", "Policies", "verified", "Every version of every agent, with its stage"),
        _item("rl_policyevent", "Policy events", "history", "Promotions, rejections and retirements"),
        _item("rl_evaluation", "Evaluations", "balance", "Measurements of a policy on held-out prompts"),
        _item("rl_judginground", "Judging rounds", "rate_review", "Answers compared side by side"),
        _item("rl_artifact", "Artifacts", "inventory_2", "Exported files, with size and SHA-256"),
        _item("rl_benchmarkresult", "Benchmark results", "speed", "Scores on public tasks"),
        _item("rl_goldencase", "Golden cases", "star", "Prompts with answers that a promotion requires"),
        _item("rl_gatesettings", "Gate settings", "rule", "What a promotion of an agent's policy requires"),
        _item("rl_servingsettings", "Serving settings", "forum", "How an agent's policies answer: limits"),
        _item("rl_upstream", "Upstreams", "cloud", "Providers: address, API key, timeouts, prices"),
    ),
    _group(
        "Training",
        "Jobs that turn feedback into policies, the data they read, and when they start by themselves.",
        _item("rl_trainingrun", "Training runs", "model_training", "Jobs with recipe, data, machine and log"),
        _item("rl_snapshot", "Snapshots", "dataset", "The files a run was trained on, which never change"),
        _item("rl_learnersettings", "Learner settings", "autorenew", "When training starts by itself"),
        _item(
            "rl_agentbase", "Base models", "deployed_code", "The model that an agent's training starts from"
        ),
        _item("rl_agentdefinition", "Agents without code", "smart_toy", "Agents defined by prompt"),
    ),
    _group(
        "Rewards and suggestions",
        "Rewards computed from feedback, and the models that predict people's ratings.",
        _item("rl_rewardrecord", "Reward records", "paid", "The reward of each decision, by component"),
        _item("rl_rewardsettings", "Reward settings", "payments", "Weights of outcomes and checks"),
        _item("rl_rewardmodelversion", "Reward models", "grade", "Models that predict ratings"),
        _item("rl_labelrun", "Label runs", "label", "Models that suggest ratings to people"),
        _item("feedback_suggestion", "Suggestions", "lightbulb", "Suggested ratings, and what people chose"),
    ),
    _group(
        "Experiments",
        "Live splits of an agent's traffic between policies.",
        _item("rl_experiment", "Experiments", "science", "Arms, metric and guardrails of each split"),
        _item("rl_experimentevent", "Experiment events", "history", "Starts and stops, with reasons"),
    ),
    _group(
        "Feedback",
        "Recorded decisions and people's ratings of them. They can be searched here, not changed.",
        _item("feedback_decision", "Decisions", "alt_route", "Prompts with the responses given to them"),
        _item("feedback_rating", "Ratings", "thumbs_up_down", "One person's rating of one decision"),
        _item(
            "feedback_comparison", "Comparisons", "compare_arrows", "Two responses, and which was preferred"
        ),
        _item("feedback_outcome", "Outcomes", "flag", "What was measured later, such as a reopened ticket"),
        _item("feedback_trace", "Traces", "timeline", "Steps of an agent: model calls, tools, tasks"),
        _item("feedback_withdrawal", "Withdrawals", "block", "Decisions excluded from training"),
        _item("feedback_agentsettings", "Agent settings", "tune", "Ratings per decision, share recorded"),
    ),
    _group(
        "People and keys",
        "Accounts, their permissions, and the API keys of apps.",
        _item("auth_user", "Users", "person", "People and their groups"),
        _item("auth_group", "Groups", "group", "Rater, operator, admin: the permissions of each"),
        _item("feedback_apikey", "API keys", "key", "Keys of apps and scripts, with their scopes"),
    ),
    _group(
        "Background work",
        "The queue of jobs for workers: waiting, due and failed.",
        _item("django_q_ormq", "Queued tasks", "hourglass_top", "Jobs that wait for a worker"),
        _item("django_q_schedule", "Scheduled tasks", "schedule", "Jobs that run at set times"),
        _item("django_q_success", "Successful tasks", "check_circle", "Jobs that ended without an error"),
        _item("django_q_failure", "Failed tasks", "error", "Jobs that ended with an error"),
    ),
]
