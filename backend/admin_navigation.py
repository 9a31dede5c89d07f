"""Navigation of the admin, for its sidebar and its first page: lists in groups, with what each is for."""

from __future__ import annotations

from typing import Any

from django.urls import reverse_lazy


def _item(name: str, title: str, icon: str, about: str) -> dict[str, Any]:
    """A list of the admin, shown to those who may see its model; `about` stands on the first page."""
    app, _, model = name.rpartition("_")
    return {
        "title": title,
        "icon": icon,
        "about": about,
        "link": reverse_lazy(f"admin:{name}_changelist"),
        "permission": lambda request: request.user.has_perm(f"{app}.view_{model}"),
    }


NAVIGATION: list[dict[str, Any]] = [
    {
        "title": "Policies",
        "about": "What was trained, how it was judged, and which policy answers. Promote, roll back and retire here.",
        "items": [
            _item("rl_policy", "Policies", "verified", "Every version of every agent, with its stage and its moves"),
            _item("rl_policyevent", "Policy events", "history", "Who promoted, rejected or retired what, and why"),
            _item("rl_evaluation", "Evaluations", "balance", "Measurements of a policy on held-out prompts"),
            _item("rl_judginground", "Judging rounds", "rate_review", "Answers that people compared side by side"),
            _item("rl_artifact", "Artifacts", "inventory_2", "Exported files, with size and SHA-256"),
            _item("rl_benchmarkresult", "Benchmark results", "speed", "Scores on public tasks, beside the base's"),
            _item("rl_goldencase", "Golden cases", "star", "Prompts that a policy must answer rightly to be promoted"),
            _item("rl_gatesettings", "Gate settings", "rule", "What a policy of an agent has to show to be promoted"),
            _item("rl_servingsettings", "Serving settings", "forum", "How an agent's policies answer: limits"),
            _item("rl_upstream", "Upstreams", "cloud", "Endpoints of providers: address, API key, timeouts, prices"),
        ],
    },
    {
        "title": "Training",
        "about": "Jobs that turn feedback into policies, the data they read, and when they start by themselves.",
        "items": [
            _item("rl_trainingrun", "Training runs", "model_training", "Every job with recipe, data, machine and log"),
            _item("rl_snapshot", "Snapshots", "dataset", "The files a run was trained on, which never change"),
            _item("rl_learnersettings", "Learner settings", "autorenew", "When an agent is trained anew by itself"),
            _item("rl_agentbase", "Base models", "deployed_code", "The model an agent's training begins with"),
            _item("rl_agentdefinition", "Agents without code", "smart_toy", "Agents defined here by prompt and answer"),
        ],
    },
    {
        "title": "Rewards and suggestions",
        "about": "Numbers computed from feedback, and the models that learn to predict what people would say.",
        "items": [
            _item("rl_rewardrecord", "Reward records", "paid", "What each decision was worth, part by part"),
            _item("rl_rewardsettings", "Reward settings", "payments", "Which outcomes and checks count, and how much"),
            _item("rl_rewardmodelversion", "Reward models", "grade", "Models that score answers as people would"),
            _item("rl_labelrun", "Label runs", "label", "Models that suggest ratings to people"),
            _item("feedback_suggestion", "Suggestions", "lightbulb", "What was suggested, and what people made of it"),
        ],
    },
    {
        "title": "Experiments",
        "about": "Live splits of an agent's traffic between policies.",
        "items": [
            _item("rl_experiment", "Experiments", "science", "Arms, metric and guardrails of each split"),
            _item("rl_experimentevent", "Experiment events", "history", "Who started or stopped what, and why"),
        ],
    },
    {
        "title": "Feedback",
        "about": "What happened and what people thought of it. Facts: they can be searched here, not changed.",
        "items": [
            _item("feedback_decision", "Decisions", "alt_route", "Prompts with the responses given to them"),
            _item("feedback_rating", "Ratings", "thumbs_up_down", "What one person thought of one decision"),
            _item("feedback_comparison", "Comparisons", "compare_arrows", "Which of two responses somebody preferred"),
            _item("feedback_outcome", "Outcomes", "flag", "What was measured later, such as a reopened ticket"),
            _item("feedback_trace", "Traces", "timeline", "Steps of an agent: model calls, tools, tasks"),
            _item("feedback_withdrawal", "Withdrawals", "block", "Decisions that nothing learns from any more"),
            _item("feedback_agentsettings", "Agent settings", "tune", "Ratings a decision waits for, share kept"),
        ],
    },
    {
        "title": "People and keys",
        "about": "Who may sign in, what each may do, and the keys that apps send.",
        "items": [
            _item("auth_user", "Users", "person", "People, and the group that says what they may do"),
            _item("auth_group", "Groups", "group", "Rater, operator, admin: the permissions of each"),
            _item("feedback_apikey", "API keys", "key", "Keys of apps and scripts, by what they may do"),
        ],
    },
    {
        "title": "Background work",
        "about": "The queue that workers take jobs from: what waits, what is due, what went wrong.",
        "items": [
            _item("django_q_ormq", "Queued tasks", "hourglass_top", "Jobs that wait for a worker"),
            _item("django_q_schedule", "Scheduled tasks", "schedule", "What runs by the clock, and when next"),
            _item("django_q_success", "Successful tasks", "check_circle", "Jobs that went through"),
            _item("django_q_failure", "Failed tasks", "error", "Jobs that broke off, with the error"),
        ],
    },
]  # fmt: skip
