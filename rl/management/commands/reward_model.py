"""The registry of reward models: list, show, judge, promote, retire."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.core.management.base import CommandError

from backend.command import CommandOptions, RatchetCommand
from rl.api.rewards import reward_model_represent
from rl.models import RewardModelVersion
from rl.reward_models import service as reward_models
from rl.reward_models.service import ranking_text


class Command(RatchetCommand):
    help = (
        "List reward models, evaluate them on held-out feedback (judge) and move them between stages. "
        "Examples: manage.py reward_model list; manage.py reward_model judge widgets-rm-v480; manage.py "
        "reward_model promote widgets-rm-v480"
    )

    class Options(CommandOptions):
        action: Literal["list", "show", "judge", "promote", "retire"]
        """What to do. Example: list"""
        name: Annotated[str | None, "?"] = None
        """Name of a reward model. Example: widgets-rm-v480"""
        agent: str | None = None
        """SLUG: List only this agent's. Example: --agent widgets"""
        force: bool = False
        """Promote although the gate is closed; needs --reason (default: refuse)."""
        reason: str = ""
        """Reason, kept on record. Example: --reason 'the raters changed'"""

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        action, name, actor = options["action"], options["name"], "reward_model"
        if (action == "list") != (name is None):
            raise CommandError(
                f"reward_model {action}: expected "
                f"{'no name' if action == 'list' else 'one name'}, found {name or 'none'}"
            )
        if action == "list":
            rows = RewardModelVersion.objects.order_by("agent", "-pk")
            if options["agent"]:
                rows = rows.filter(agent=options["agent"])
            return {"reward_models": [reward_model_represent(row) for row in rows]}
        model = reward_models.reward_model_get(name)
        if action == "judge":
            model = reward_models.reward_model_judge(model, actor=actor)
        elif action == "promote":
            model = reward_models.reward_model_promote(
                model, actor=actor, reason=options["reason"], force=options["force"]
            )
        elif action == "retire":
            model = reward_models.reward_model_retire(model, actor=actor, reason=options["reason"])
        return {
            **reward_model_represent(model),
            "sha256": model.sha256,
            "path": model.path,
            "events": [
                {
                    "at": event.created_at.isoformat(),
                    "kind": event.kind,
                    "actor": event.actor,
                    "reason": event.reason,
                }
                for event in model.events.all()
            ],
        }

    def show(self, result: dict[str, Any]) -> None:
        if result.get("reward_models") == []:
            self.stdout.write("No reward models yet.")
        for row in result.get("reward_models", []):
            self.stdout.write(f"{row['name']:<30} {row['stage']:<10} {ranking_text(row['ranking'])}")
        if "name" in result:
            self.stdout.write(f"{result['name']} is {result['stage']}: it {ranking_text(result['ranking'])}")
            for event in result["events"]:
                self.stdout.write(
                    f"  {event['at'][:16]}  {event['kind']:<10} {event['actor']}: {event['reason']}"
                )

    def next_step(self, result: dict[str, Any]) -> str:
        rows = result.get("reward_models", [result])
        if not rows:
            return "python manage.py train_reward_model --agent SLUG"
        first = rows[0]
        if first["stage"] == "champion":
            return f"python manage.py run_pipeline --agent {first['agent']} --method rlhf"
        move = "promote" if first["ranking"] else "judge"
        return f"python manage.py reward_model {move} {first['name']}"
