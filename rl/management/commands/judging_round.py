"""Judging rounds: create, list, show, stop."""

from __future__ import annotations

from typing import Annotated, Literal

from django.core.management.base import CommandError
from pydantic import Field

from backend.command import CommandOptions, RatchetCommand, Result
from rl.evaluation.judge_model import round_judge
from rl.evaluation.judging import INCUMBENT, MOST_PROMPTS, PROMPTS, round_answer, round_create
from rl.models import JudgingRound
from rl.registry import service as registry
from rl.registry.judge_reports import round_represent
from rl.registry.judging import round_get, round_stop

ACTOR = "judging_round"


class Options(CommandOptions):
    action: Literal["create", "list", "show", "stop", "answer", "judge"]
    """create: begin a round; answer: generate its answers here; judge: let --policy judge the pairs beside people.
    Example: create"""
    number: Annotated[int | None, "?"] = None
    """Number of the round, for show, stop and answer. Example: 3"""
    policy: str | None = None
    """NAME: Policy to judge, for create; for judge, the hosted model or adapter that judges. Example: --policy
    support-bot-v73"""
    against: str = INCUMBENT
    """NAME: Opponent: incumbent (default: the agent's champion, else its base model), base, or a policy.
    Example: --against base"""
    prompts: int = Field(
        PROMPTS,
        description=f"N: Prompts that both answer, at most {MOST_PROMPTS} (default {PROMPTS}). "
        "Example: --prompts 100",
    )
    raters: int = 1
    """N: People who judge each prompt (default 1: different people share the prompts). Example: --raters
    3"""
    margin: float | None = None
    """SHARE: Loss of win share below one half that still counts as not worse (default: the gate's
    not_inferior, else 0.1). Example: --margin 0.05"""
    agent: str | None = None
    """SLUG: Only rounds of this agent, for list. Example: --agent support-bot"""
    reason: str = ""
    """Why it is stopped, kept on record. Example: --reason 'enough'"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Compare a policy's answers with its opponent's, side by side: people judge blind pairs at /rate/pairs/ until "
        "a test gives a verdict that holds whenever the round is stopped. Examples: manage.py judging_round create "
        "--policy support-bot-v73; manage.py judging_round list --agent support-bot; manage.py judging_round show "
        "3; manage.py judging_round stop 3 --reason enough"
    )

    def work(self, options: Options) -> Result:
        action = options.action
        if action == "list":
            rows = JudgingRound.objects.select_related("policy", "opponent")
            if options.agent:
                rows = rows.filter(agent=options.agent)
            return {"rounds": [round_represent(row) for row in rows]}
        if action == "create":
            if not options.policy:
                raise CommandError("judging_round create: expected --policy NAME, found none")
            judging = round_create(
                registry.policy_get(options.policy),
                against=options.against,
                prompts=options.prompts,
                raters=options.raters,
                margin=options.margin,
                actor=ACTOR,
            )
            return round_represent(self._answered(judging))
        if options.number is None:
            raise CommandError(f"judging_round {action}: expected the number of a round, found none")
        judging = round_get(options.number)
        if action == "answer":
            judging = self._answered(judging)
        if action == "judge":
            if not options.policy:
                raise CommandError("judging_round judge: expected --policy JUDGE, found none")
            with self.bar(f"judging round {judging.pk}") as bar:
                round_judge(judging, registry.policy_get(options.policy), bar.update)
        if action == "stop":
            judging = round_stop(judging, actor=ACTOR, reason=options.reason)
        return round_represent(judging)

    def _answered(self, judging: JudgingRound) -> JudgingRound:
        with self.bar(f"judging round {judging.pk}") as bar:
            return round_answer(judging, bar.update)

    def show(self, result: Result) -> None:
        if result.get("rounds") == []:
            self.stdout.write("No judging rounds yet.")
        for row in result.get("rounds", [result]):
            self.stdout.write(f"Round {row['id']} ({row['status']}): {row['words']}")
        if "rounds" not in result:
            counts = ("wins", "losses", "ties", "same", "both_bad", "waiting", "judgements", "raters")
            self.stdout.write(", ".join(f"{name.replace('_', ' ')} {result[name]}" for name in counts))
            for name in ("judge", "further", "reason"):
                if result[name]:
                    self.stdout.write(f"{name}: {result[name]}")

    def next_step(self, result: Result) -> str:
        if "rounds" in result:
            return "python manage.py judging_round create --policy NAME"
        if result["status"] == JudgingRound.Status.ENDED:
            return f"/policies/{result['policy']}/ (make serve)"
        return f"judge the pairs at {result['address']} (make serve)"
