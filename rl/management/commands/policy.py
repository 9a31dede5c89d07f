"""The registry: list, show, promote, reject, roll back, retire, compare, verify, store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from django.core.management.base import CommandError

from backend import command
from backend.command import CommandOptions, RatchetCommand, Result
from feedback.selectors import agent_slugs
from rl import artifacts
from rl.gates.headlines import headline_of, share_of
from rl.management.options import verdict_lines
from rl.models import Policy
from rl.registry import service as registry
from rl.registry.checklist import VerdictShown, policy_verdict
from rl.registry.comparisons import policy_diff
from rl.registry.incumbents import incumbent_sync
from rl.registry.integrity import base_fault_of, verify
from rl.selectors import policy_overview
from rl.serving.engines import adapters_here


class Options(CommandOptions):
    action: Literal["list", "show", "promote", "reject", "rollback", "retire", "diff", "verify", "store"]
    """What to do. Example: list"""
    names: Annotated[list[str], "*"]
    """Names of policies: one for show, promote, reject and retire, two for diff, none for store, any number for verify
    (none: all); the agent for rollback. Example: widgets-v480"""
    agent: str | None = None
    """SLUG: List or verify only this agent's. Example: --agent widgets"""
    to: Literal["challenger", "champion"] = "champion"
    """Stage to promote to (default champion). Example: --to challenger"""
    force: bool = False
    """Promote although the gate is closed; needs --reason (default: refuse)."""
    reason: str = ""
    """Reason, kept on record. Example: --reason 'the old one is offensive'"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "List, show, compare and verify policies, and move them between stages. Examples: manage.py policy "
        "list; manage.py policy promote widgets-v480; manage.py policy rollback widgets; manage.py policy "
        "diff widgets-v480 widgets-v980; manage.py policy verify; manage.py policy store"
    )

    def work(self, options: Options) -> Result:
        action, names, actor = options.action, options.names, "policy"
        expected = {"list": 0, "diff": 2}.get(action, 1)
        if action == "verify":
            return self._verify(names, options.agent)
        if action == "store":
            if artifacts.store() is None:
                raise CommandError("ARTIFACT_STORE is not set: there is no store to put files into")
            return {"stored": artifacts.put_all()}
        if len(names) != expected:
            raise CommandError(f"policy {action} takes {expected} names, found {len(names)}")
        if action == "list":
            for agent in [options.agent] if options.agent else agent_slugs():
                incumbent_sync(agent)
            rows = Policy.objects.order_by("agent", "-pk")
            if options.agent:
                rows = rows.filter(agent=options.agent)
            return {"policies": [_policy_summary(policy) for policy in rows]}
        if action == "diff":
            return policy_diff(registry.policy_get(names[0]), registry.policy_get(names[1]))
        if action == "rollback":
            return _policy_summary(registry.policy_rollback(names[0], actor=actor, reason=options.reason))
        policy = registry.policy_get(names[0])
        incumbent_sync(policy.agent)  # The gate's opponent may be the app's own model.
        policy.refresh_from_db()
        if action == "show":
            overview = policy_overview(policy)
            return {
                **_policy_summary(policy),
                "why": VerdictShown.of(policy_verdict(policy)),
                "parent": policy.parent.name if policy.parent else None,
                "adapter": policy.adapter_path,
                "sha256": policy.adapter_sha256,
                "base_model": policy.base_model,
                "base_model_fault": base_fault_of(policy),
                "children": [child.name for child in overview.children],
                "artifacts": [artifact.path for artifact in overview.artifacts],
                "events": [
                    {
                        "at": event.created_at.isoformat(),
                        "kind": event.kind,
                        "to": event.to_stage,
                        "actor": event.actor,
                        "reason": event.reason,
                        "forced": event.forced,
                    }
                    for event in overview.events
                ],
            }
        if action == "promote":
            with self.bar("promoting") as bar:
                bar.update(0, 0, "checking the gate, then exporting the files it is served from")
                moved = registry.policy_promote(
                    policy, options.to, actor=actor, reason=options.reason, force=options.force
                )
            adapters = adapters_here().filter(policy=moved.name)
            return _policy_summary(moved) | {
                "engines": {one.engine: one.fault or "answers" for one in adapters}
            }
        elif action == "reject":
            moved = registry.policy_reject(policy, actor=actor, reason=options.reason)
        else:
            moved = registry.policy_retire(policy, actor=actor, reason=options.reason)
        return _policy_summary(moved)

    def _verify(self, names: list[str], agent: str | None) -> Result:
        """Compare files with their checksums; exit code 1 if one is damaged or missing."""
        policies: list[Policy] | None = [registry.policy_get(name) for name in names] or None
        if agent:
            policies = list(Policy.objects.filter(agent=agent).order_by("pk"))
        report = verify(policies)
        self.failed = bool(report["findings"])
        return report

    def show(self, result: Result) -> None:
        for finding in result.pop("findings", []):
            where = f"{finding['what']} ({finding['kind']}): {finding['path']} is {finding['state']}"
            sums = f", expected {finding['expected'][:16]}, found {finding['found'][:16] or 'nothing'}"
            self.stdout.write(f"{where}{sums}; {finding['remedy']}")
        if result.get("policies") == []:
            self.stdout.write("No policies yet.")
        for row in result.get("policies", []):
            figure = row["judged_text"] or "not evaluated"
            if row["kind"] == Policy.Kind.RECORDED:
                figure = "answers that the app recorded"
            self.stdout.write(f"{row['name']:<30} {row['stage']:<10} {row['kind']:<8} {figure}")
        for line in verdict_lines(result.pop("why")) if "why" in result else ():
            self.stdout.write(line)
        for engine, state in result.pop("engines", {}).items():
            said = "answers with this adapter" if state == "answers" else f"does not answer with it: {state}"
            self.stdout.write(f"{engine} {said}")
        for name, value in result.items():
            if name != "policies":
                self.stdout.write(f"{name}: {value}")

    def next_step(self, result: Result) -> str:
        if "checked" in result:
            return "" if self.failed else "python manage.py policy list"
        if "policies" in result:
            return "" if result["policies"] else "python manage.py train_dpo --agent SLUG --dry-run"
        return NEXT_STEPS.get(result.get("stage", ""), lambda row: "")(result)


NEXT_STEPS: dict[str, Callable[[Result], str]] = {
    Policy.Stage.CANDIDATE: lambda row: _after_candidate(row),
    Policy.Stage.CHALLENGER: lambda row: command.after_challenge(row["name"], row["agent"]),
    Policy.Stage.CHAMPION: lambda row: command.after_promotion(row["name"], row["agent"], row["kind"]),
}
"""Stage of the resulting policy -> next step."""


def _after_candidate(row: Result) -> str:
    if row["against"]:
        return command.after_gate_opens(row["name"])
    champion = registry.champion_of(row["agent"])
    return command.after_training(row["name"], champion.name if champion is not None else "")


def _policy_summary(policy: Policy) -> Result:
    accuracy, leading = share_of(policy.metrics, "preference_accuracy"), headline_of(policy.metrics)
    return {
        "name": policy.name,
        "agent": policy.agent,
        "kind": str(policy.kind),
        "title": policy.title,
        "stage": str(policy.stage),
        "feedback_count": policy.feedback_count,
        "preference_accuracy": accuracy.value if accuracy else None,
        "judged": policy.metrics.get("headline"),
        "judged_text": f"{leading.text} {leading.title.lower()}" if leading else "",
        "against": policy.metrics.get("against"),
    }
