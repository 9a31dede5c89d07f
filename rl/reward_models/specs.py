"""Reward specs of an order (`--reward`) for the training package: names and run numbers become folders."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings

from backend.installation import PROGRAM
from rl.models import LabelRun, RewardModelVersion, TrainingRun
from rl.models.runs import RunRefused, run_folder
from rl.registry import service as registry
from rl.reward_models.service import reward_model_folder, reward_model_get
from rl.rewards.catalogue import LEARNED_REWARD, rewards_named


def rewards_located(specs: str, agent: str) -> str:
    """Reward specs with folders: `model:RUN` and `model:NAME` become `model:FOLDER`, `learned` becomes `learned:FOLDER`
    (the agent's newest label model). `auto` stays until the run has a reward model.

    Raises RunRefused for an unknown run, a run without a reward model, and without a label model; RewardRefused for an
    unknown name.
    """
    from rl.training.result import ResultError, TrainResult

    names = []
    for spec in specs.split(","):
        kind, _, name = spec.strip().partition(":")
        if kind == "code_execution" and not settings.ENABLE_CODE_EXECUTION:
            raise RunRefused(
                "--reward code_execution runs code that a model wrote and is off: set ENABLE_CODE_EXECUTION=true "
                "to turn it on (docs/rewards.md)"
            )
        if spec.strip() == LEARNED_REWARD:
            labels = LabelRun.objects.filter(agent=agent).exclude(path="").order_by("-pk").first()
            if labels is None:
                raise RunRefused(
                    f"--reward learned: no reward was learned from ratings of {agent} yet; run "
                    f"`{PROGRAM} auto_label --agent {agent}` first"
                )
            spec = f"{LEARNED_REWARD}:{registry.home_path(labels.path)}"
        if kind == "model" and not name.isdigit() and not Path(name).exists():
            spec = f"model:{reward_model_folder(reward_model_get(name))}"
        if kind == "model" and name.isdigit():
            run = TrainingRun.objects.filter(pk=int(name), method="reward_model").first()
            if run is None:
                raise RunRefused(
                    f"--reward {spec}: run {name} trained no reward model; see `{PROGRAM} train_reward_model`"
                )
            registered = RewardModelVersion.objects.filter(run=run).first()
            try:
                spec = "model:" + (
                    str(reward_model_folder(registered))
                    if registered
                    else TrainResult.load(run_folder(run) / "result.json").checkpoint
                )
            except ResultError as error:
                raise RunRefused(
                    f"--reward {spec}: run {name} is {run.status} and left no model ({error})"
                ) from error
        names.append(spec.strip())
    rewards_named(names, code_execution=settings.ENABLE_CODE_EXECUTION)
    return ",".join(names)


def reward_model_of(run: TrainingRun) -> RewardModelVersion | None:
    """The registered reward model a run learnt from, the first of several; None without one."""
    for spec in str(run.recipe.get("reward", "")).split(","):
        kind, _, name = spec.strip().partition(":")
        if kind == "model":
            known = RewardModelVersion.objects.filter(run_id=int(name)) if name.isdigit() else None
            found = (known or RewardModelVersion.objects.filter(name=name)).first()
            if found is not None:
                return found
    return None
