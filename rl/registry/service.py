"""Registry of policies: register, move between stages, record every step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from django.conf import settings
from django.db import IntegrityError, transaction
from django.dispatch import Signal

from backend.installation import PROGRAM
from feedback.rating.requests import verdict_ask
from rl import artifacts
from rl.checksums import FileDamaged
from rl.gates.headlines import (
    baseline_text,
    coverage_text,
    fields_of,
    fields_text,
    headline,
    liked_of,
    right_answer_figure,
)
from rl.gates.report import GateReport, GeneralAnswers
from rl.models import Artifact, Evaluation, Policy, PolicyEvent, TrainingRun
from rl.registry.gate_evidence import evidence_of, gate_difference, policy_judge, rival_name
from rl.registry.integrity import adapter_folder
from rl.registry.judging import rounds_end

logger = logging.getLogger("rl.registry.service")

Stage = Policy.Stage
Kind = PolicyEvent.Kind


class RegistryRefused(ValueError):
    """A move that the registry does not allow; the message says why."""

    code = "conflict"


MOVES: dict[str, tuple[str, ...]] = {
    Stage.CANDIDATE: (Stage.CHALLENGER, Stage.CHAMPION, Stage.REJECTED, Stage.RETIRED),
    Stage.CHALLENGER: (Stage.CHAMPION, Stage.REJECTED, Stage.RETIRED),
    Stage.CHAMPION: (Stage.RETIRED,),
    Stage.RETIRED: (Stage.CHAMPION,),
    Stage.REJECTED: (),
}
"""Stage -> stages a policy may move to. Rejected is final: a better policy is a new one."""


REPLACED = "replaced by"
"""Beginning of the reason for retiring a replaced champion."""


def home_path(path: str | Path) -> Path:
    """Absolute path of a stored path; relative ones are inside RATCHET_HOME."""
    return settings.RATCHET_HOME / path


def home_relative(path: str | Path) -> str:
    """The path as stored: relative inside RATCHET_HOME, so that the folder can move."""
    resolved = Path(path).resolve()
    return str(
        resolved.relative_to(settings.RATCHET_HOME)
        if resolved.is_relative_to(settings.RATCHET_HOME)
        else resolved
    )


def policy_name_next(agent: str, feedback_count: int) -> str:
    """`<agent>-v<feedback count>`, with .2, .3, ... if that exists."""
    return policy_name_free(f"{agent}-v{feedback_count}")


def policy_name_free(name: str) -> str:
    """The name, with .2, .3, ... if a policy has it."""
    taken = set(Policy.objects.filter(name__startswith=name).values_list("name", flat=True))
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}.{number}"
    return candidate


def champion_of(agent: str) -> Policy | None:
    return Policy.objects.filter(agent=agent, stage=Stage.CHAMPION).first()


def champions_before(agent: str, most: int = 1) -> list[Policy]:
    """Up to `most` retired policies that a newer champion replaced, latest first; not those rolled back from."""
    events = PolicyEvent.objects.filter(
        policy__agent=agent,
        policy__stage=Stage.RETIRED,
        from_stage=Stage.CHAMPION,
        to_stage=Stage.RETIRED,
        kind=Kind.RETIRED,
    )
    newest = events.order_by("-id").select_related("policy")
    # a policy that was champion twice has two such events
    return list({event.policy_id: event.policy for event in newest[: 2 * most]}.values())[:most]


def policy_get(name: str) -> Policy:
    """The policy of a name. Raises RegistryRefused, naming existing ones."""
    policy = Policy.objects.filter(name=name).first()
    if policy is None:
        names = list(Policy.objects.order_by("-id").values_list("name", flat=True)[:5])
        there = (
            f"there are {', '.join(names)}"
            if names
            else f"there are none yet: train one with `{PROGRAM} train_dpo`"
        )
        raise RegistryRefused(f"no policy is named {name!r}; {there}")
    return policy


def policies_started(policy: Policy) -> list[Policy]:
    """The policies whose weights a policy's training started from, nearest first; none for one from the base."""
    found: list[Policy] = []
    while policy.run is not None:
        begun = Policy.objects.filter(name=policy.run.recipe.get("start_from", "")).first()
        if begun is None or begun in found:
            break
        found.append(begun)
        policy = begun
    return found


def policy_register(
    run: TrainingRun,
    *,
    name: str,
    adapter: Path,
    adapter_sha256: str,
    feedback_count: int,
    actor: str,
    kind: str = Policy.Kind.ADAPTER,
) -> Policy:
    """Registers a finished run's adapter as a candidate.

    Its parent is the policy it started from, else the agent's champion.
    """
    begun = Policy.objects.filter(name=run.recipe.get("start_from", "")).first()
    with transaction.atomic():
        policy = Policy.objects.create(
            name=name,
            kind=kind,
            agent=run.agent,
            parent=begun or champion_of(run.agent),
            run=run,
            base_model=run.base_model,
            base_model_hash=run.base_model_hash,
            adapter_path=home_relative(adapter),
            adapter_sha256=adapter_sha256,
            feedback_count=feedback_count,
        )
        PolicyEvent.objects.create(
            policy=policy,
            kind=Kind.REGISTERED,
            to_stage=policy.stage,
            actor=actor,
            reason=f"trained by run {run.pk}",
        )
    return policy


def policy_evaluated(policy: Policy, evaluation: Evaluation, *, actor: str) -> None:
    """Stores an evaluation's figures on its policy."""
    figures = evaluation.figures
    names = ("preference_accuracy", "valid_rate", "average_reward", "reward_std", "rewards_known")
    summary = {key: figures.get(key) for key in names}
    for name in ("right", "incumbent"):
        if figures.get(name):
            summary[name] = figures[name]
    if (liked := liked_of(figures)) is not None:
        summary["liked"] = liked
    if (known := right_answer_figure(figures)) is not None:
        summary["known_answer"] = known
    if fields := fields_text(figures):
        summary["fields"] = {"words": fields, **fields_of(figures)}
    if general := figures.get("general"):
        summary["general"] = {**general, "words": GeneralAnswers(**general).words}
    if coverage := coverage_text(figures):
        summary["coverage"] = {"words": coverage}
    if (leading := headline(figures)) is not None:
        summary["headline"] = leading
        # a figure of its own name, so that it can be followed over versions
        summary[leading["kind"]] = {part: leading.get(part) for part in ("value", "low", "high", "n")}
    if clusters := figures.get("clusters"):
        # without the examples, so that erasure has to search evaluations only
        summary["clusters"] = {name: count for name, count in clusters.items() if name != "largest"}
    if baseline := baseline_text(figures):
        summary["baseline"] = {"words": baseline, "headline": headline(figures["baseline"])}
    if comparison := figures.get("comparison"):
        summary["against"] = comparison["against"]
        summary["against_title"] = comparison.get("title", comparison["against"])
        summary["against_preference_accuracy"] = comparison.get("preference_accuracy")
        summary["difference"] = gate_difference(evaluation) or comparison["difference"]
        summary["p_value"] = comparison["p_value"]
    if evaluation.split == "holdout" and evaluation.against == rival_name(policy):
        # what would change this verdict is asked for first
        verdict_ask(policy.agent, evidence_of(evaluation).open_prompts)
    with transaction.atomic():
        Policy.objects.filter(pk=policy.pk).update(metrics=summary)
        PolicyEvent.objects.create(
            policy=policy, kind=Kind.EVALUATED, actor=actor, verdicts={"evaluation": evaluation.pk, **summary}
        )


def artifact_register(policy: Policy, *, actor: str, **facts: object) -> Artifact:
    """Records an exported file and stores it; exporting again to the same place replaces the record."""
    artifacts.put(str(facts["path"]))
    with transaction.atomic():
        artifact, _ = Artifact.objects.update_or_create(policy=policy, path=facts.pop("path"), defaults=facts)
        PolicyEvent.objects.create(
            policy=policy,
            kind=Kind.EXPORTED,
            actor=actor,
            reason=f"{artifact.format} {artifact.quantization}".strip(),
            verdicts={"path": artifact.path, "sha256": artifact.sha256, "bytes": artifact.bytes},
        )
    return artifact


def policy_promote(
    policy: Policy,
    to: str = Stage.CHAMPION,
    *,
    actor: str,
    reason: str = "",
    force: bool = False,
    live: Mapping[str, object] | None = None,
) -> Policy:
    """Promotes a policy to challenger or champion; retires the champion it replaces in the same transaction.

    The agent's gate must open by the newest evaluation against the champion (or the base model). `force` with a reason
    overrides it, on record for ever. The event keeps the gate report, refusals included. live: figures of an experiment
    that showed it to be better with users; the gate then only asks whether it is not worse. Its serving files are
    written first, so that it can answer once the promotion is known. Raises RegistryRefused, also for a damaged file.
    """
    if to not in (Stage.CHALLENGER, Stage.CHAMPION):
        raise RegistryRefused(f"{policy.name}: expected promotion to challenger or champion, found {to!r}")
    if force and not reason.strip():
        raise RegistryRefused("a promotion by force needs a reason, which is kept on record; found none")
    if policy.kind == Policy.Kind.RECORDED and not force:
        raise RegistryRefused(
            f"{policy.name} is known by its recorded answers alone, which no gate judges; to put it back for "
            f"its successor: {PROGRAM} policy rollback {policy.agent}"
        )
    report = policy_judge(policy, to if live is None else Stage.CHALLENGER)
    if to in MOVES[policy.stage]:
        if not force and (fault := _gate_fault(policy, report)):
            _refusal_record(policy, to, fault, report, actor=actor)
            raise RegistryRefused(
                f"{policy.name} stays {policy.stage}: {fault}; or promote it by force with a reason"
            )
        try:
            _prepare(policy, force=force)
        except RegistryRefused as refusal:
            _refusal_record(policy, to, str(refusal), report, actor=actor)
            raise
    return _move(
        policy,
        to,
        kind=Kind.PROMOTED,
        actor=actor,
        reason=reason,
        forced=force,
        verdicts={
            **(report.dump() if report else {}),
            **({"live": dict(live)} if live is not None else {}),
        },
    )


def _refusal_record(policy: Policy, to: str, fault: str, report: GateReport | None, *, actor: str) -> None:
    """Records a refused promotion with its gate report. It is lost if the caller rolls back its own transaction, as
    experiments do, which keep their own history."""
    nothing = {"to": to, "against": rival_name(policy), "passed": False, "verdicts": []}
    verdicts = report.dump() if report else nothing
    PolicyEvent.objects.create(policy=policy, kind=Kind.GATED, actor=actor, reason=fault, verdicts=verdicts)


def _prepare(policy: Policy, *, force: bool) -> None:
    """Prepares what serves a policy. Raises RegistryRefused if a file is damaged and, unless forced, if nothing could
    answer for it."""
    _undamaged(policy)
    try:
        policy_promoting.send(sender=Policy, policy=policy)
    except PreparationRefused as refusal:
        if not force:
            raise RegistryRefused(f"{policy.name} stays {policy.stage}: {refusal}") from refusal
        logger.warning("%s is promoted by force although it cannot be served: %s", policy.name, refusal)


def _undamaged(policy: Policy) -> None:
    """Raises RegistryRefused if a file of a policy differs from its record."""
    try:
        if policy.has_files:
            adapter_folder(policy)
    except FileDamaged as damage:
        raise RegistryRefused(f"{policy.name} stays {policy.stage}: {damage}") from damage


def _gate_fault(policy: Policy, report: GateReport | None) -> str:
    """Why the gate does not open; empty if it does."""
    if report is not None:
        return report.reason
    rival = rival_name(policy)
    option = "--compare-base" if rival == "base" else f"--compare {rival}"
    newest = policy.metrics.get("against")
    found = (
        f"its newest evaluation is against {newest}, not {rival}"
        if newest
        else f"it was not compared with {rival} yet"
    )
    return f"{found}; run `{PROGRAM} evaluate_model --policy {policy.name} {option}`"


def policy_instate(policy: Policy, *, actor: str, reason: str) -> bool:
    """Makes a hosted or recorded policy the champion without a gate: it is what answers today.

    Returns False and changes nothing if the champion was trained here, or is this policy.
    """
    champion = champion_of(policy.agent)
    if champion is not None and (champion.has_files or champion == policy):
        return False
    _move(policy, Stage.CHAMPION, kind=Kind.PROMOTED, actor=actor, reason=reason)
    return True


def policy_gated(policy: Policy, to: str, *, actor: str) -> GateReport:
    """Asks the gate and records its report. Raises RegistryRefused without a comparison."""
    report = policy_judge(policy, to)
    if report is None:
        raise RegistryRefused(f"{policy.name}: {_gate_fault(policy, None)}")
    PolicyEvent.objects.create(
        policy=policy, kind=Kind.GATED, actor=actor, reason=report.reason, verdicts=report.dump()
    )
    return report


def policy_reject(policy: Policy, *, actor: str, reason: str) -> Policy:
    """Rejects a candidate or challenger for good."""
    if not reason.strip():
        raise RegistryRefused("expected a reason for the rejection, found none")
    return _move(policy, Stage.REJECTED, kind=Kind.REJECTED, actor=actor, reason=reason)


def policy_retire(policy: Policy, *, actor: str, reason: str = "") -> Policy:
    """Takes a policy out of service; its row and history stay."""
    return _move(policy, Stage.RETIRED, kind=Kind.RETIRED, actor=actor, reason=reason)


def rollback_possible(policy: Policy) -> bool:
    """True of a champion with a predecessor to go back to."""
    return policy.stage == Stage.CHAMPION and bool(champions_before(policy.agent))


def policy_rollback(agent: str, *, actor: str, reason: str = "") -> Policy:
    """Puts the previous champion back. Raises RegistryRefused if there is none."""
    with transaction.atomic():
        present = Policy.objects.select_for_update().filter(agent=agent, stage=Stage.CHAMPION).first()
        if present is None:
            raise RegistryRefused(f"agent {agent} has no champion to roll back from")
        earlier = champions_before(agent)
        if not earlier:
            raise RegistryRefused(f"{present.name} has no predecessor to roll back to")
        _undamaged(earlier[0])
        _move(present, Stage.RETIRED, kind=Kind.ROLLED_BACK, actor=actor, reason=reason or "rolled back")
        return _move(
            earlier[0],
            Stage.CHAMPION,
            kind=Kind.ROLLED_BACK,
            actor=actor,
            reason=reason or f"replaces {present.name}",
        )


def _move(
    policy: Policy,
    to: str,
    *,
    kind: str,
    actor: str,
    reason: str,
    forced: bool = False,
    verdicts: Mapping[str, object] | None = None,
) -> Policy:
    try:
        with transaction.atomic():
            current = Policy.objects.select_for_update().get(pk=policy.pk)
            if to == current.stage:
                raise RegistryRefused(f"{current.name} is {to} already")
            if to not in MOVES[current.stage]:
                allowed = ", ".join(MOVES[current.stage]) or "nowhere"
                raise RegistryRefused(
                    f"{current.name} is {current.stage} and can move to {allowed}, not to {to}"
                )
            if to == Stage.CHAMPION:
                for champion in Policy.objects.select_for_update().filter(
                    agent=current.agent, stage=Stage.CHAMPION
                ):
                    Policy.objects.filter(pk=champion.pk).update(stage=Stage.RETIRED)
                    PolicyEvent.objects.create(
                        policy=champion,
                        kind=Kind.RETIRED,
                        from_stage=Stage.CHAMPION,
                        to_stage=Stage.RETIRED,
                        actor=actor,
                        reason=f"{REPLACED} {current.name}",
                    )
                    rounds_end(champion, f"was {REPLACED} {current.name}")
            Policy.objects.filter(pk=current.pk).update(stage=to)
            PolicyEvent.objects.create(
                policy=current,
                kind=kind,
                from_stage=current.stage,
                to_stage=to,
                actor=actor,
                reason=reason,
                forced=forced,
                verdicts=verdicts or {},
            )
            if to in (Stage.REJECTED, Stage.RETIRED):
                rounds_end(current, f"was {to}")
            transaction.on_commit(partial(policy_moved.send, sender=Policy))
    except IntegrityError as error:
        # two promotions at once: the database keeps one champion per agent
        raise RegistryRefused(
            f"another policy of {policy.agent} was promoted at the same time; reload and try again"
        ) from error
    policy.refresh_from_db()
    return policy


BUTTONS = ("challenger", "champion", "retired", "rejected", "rollback")
"""Moves that a form may ask for."""


def policy_move(policy: Policy, move: str, *, actor: str, reason: str, force: bool) -> Policy:
    """The move of a button: a stage, or rollback. Raises RegistryRefused."""
    if move in ("challenger", "champion"):
        return policy_promote(policy, move, actor=actor, reason=reason, force=force)
    if move == "rejected":
        return policy_reject(policy, actor=actor, reason=reason)
    if move == "retired":
        return policy_retire(policy, actor=actor, reason=reason)
    if move == "rollback":
        return policy_rollback(policy.agent, actor=actor, reason=reason)
    raise RegistryRefused(f"expected one of {', '.join(BUTTONS)}; found {move!r}")


# --- Preparation for serving ---


policy_promoting = Signal()
"""Sent with `policy` before it is promoted. A receiver that cannot serve it raises PreparationRefused."""

policy_moved = Signal()
"""Sent once a policy's new stage is committed."""


class PreparationRefused(RuntimeError):
    """A policy's serving files cannot be written; the message says which, why and what to do."""
