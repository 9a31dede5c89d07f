"""Evidence for the gate: the newest comparison, the attempt's number, benchmark results, the report."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from django.db.models import Q

from backend.installation import PROGRAM
from feedback.rating.requests import prompts_asked
from feedback.storage.sql import chunks
from rl.checksums import file_sum
from rl.datasets.prompt_clusters import cluster_text
from rl.gates.effects import effect_of, items_of, lead_of
from rl.gates.headlines import fields_text, right_of_classifier
from rl.gates.report import (
    AnswerPair,
    BenchmarkCases,
    Case,
    Evidence,
    GateBounds,
    GateReport,
    GeneralAnswers,
    GoldenResult,
    StoredAnswer,
    StoredEvidence,
)
from rl.gates.rules import CHAMPION, alpha_of_attempt, gate_interval, gate_judge
from rl.models import BenchmarkResult, Evaluation, GateSettings, Policy, PolicyEvent, PromptSplit
from rl.recipes.benchmark_tasks import BUNDLED, HUB, INSTALLED, TaskRefused, task_folder
from rl.registry.judging import round_evidence
from rl.statistics import Difference


def gate_bounds(agent: str) -> GateBounds:
    """The agent's bounds, or the defaults. Raises GateError for one outside its range."""
    row = GateSettings.objects.filter(agent=agent).first()
    return row.bounds if row else GateBounds()


def policy_judge(policy: Policy, to: str = CHAMPION) -> GateReport | None:
    """The gate report of the policy's newest comparison with its rival; None without one.

    The rival is the agent's champion, or the base model if there is none.
    """
    evaluation = comparison_newest(policy)
    return None if evaluation is None else evaluation_judged(policy, evaluation, to)[1]


def evaluation_judged(policy: Policy, evaluation: Evaluation, to: str) -> tuple[Evidence, GateReport]:
    """Evidence of a comparison, and its gate report."""
    bounds = gate_bounds(policy.agent)
    evidence = evidence_of(evaluation)
    if listed := bounds.benchmark_bounds:
        evidence = dataclasses.replace(evidence, **gate_benchmarks(policy, list(listed)))
    return evidence, gate_judge(evidence, bounds, to)


def rival_name(policy: Policy) -> str:
    """Name of the policy to beat: the champion's, or `base`."""
    champion = Policy.objects.filter(agent=policy.agent, stage=Policy.Stage.CHAMPION).first()
    return champion.name if champion is not None and champion.pk != policy.pk else "base"


def rival_title(name: str) -> str:
    """Title of an opponent for readers."""
    if name == "base":
        return "the base model"
    policy = Policy.objects.filter(name=name).first()
    return policy.title if policy is not None else name


def comparison_newest(policy: Policy) -> Evaluation | None:
    """The policy's newest evaluation on the holdout against its rival."""
    return (
        policy.evaluations.filter(split="holdout", against=rival_name(policy))
        .select_related("snapshot", "policy")
        .defer("evidence", "figures")
        .order_by("-pk")
        .first()
    )


def evidence_of(evaluation: Evaluation) -> Evidence:
    """A stored evaluation as evidence for the gate's rules."""
    body: StoredEvidence = evaluation.evidence
    asked = prompts_asked(evaluation.agent)
    off_policy = body.get("off_policy")
    return Evidence(
        against=evaluation.against,
        cases=[item for item in items_of(body.get("cases", ())) if isinstance(item, Case)],
        other_kinds={kind: items_of(items) for kind, items in body.get("others", {}).items()},
        exclusions=body.get("barred", {}),
        answer_pairs=[
            _answer_pair(one, asked=one["prompt_hash"] in asked) for one in body.get("answers", ())
        ],
        kl=body.get("kl"),
        written_gain=Difference(**gain) if (gain := body.get("written_gain")) else None,
        general=GeneralAnswers(**general) if (general := body.get("general")) else None,
        good_chars=(good["value"], good["n"]) if (good := body.get("good_chars")) else None,
        golden=[GoldenResult(**case) for case in body.get("golden", ())],
        off_policy=Difference(**off_policy) if off_policy else None,
        judging=round_evidence(evaluation.policy, evaluation.against) if evaluation.policy else None,
        attempt=attempt_of(evaluation),
        near_identical=cluster_text(evaluation.figures.get("clusters") or {}),
        discrete=body.get("discrete", False),
        right_beside=right_of_classifier(evaluation.figures),
        fields=fields_text(evaluation.figures),
    )


PAIR_FIELDS = frozenset(field.name for field in dataclasses.fields(AnswerPair))


def _answer_pair(stored: StoredAnswer, *, asked: bool) -> AnswerPair:
    facts: dict[str, Any] = {name: value for name, value in stored.items() if name in PAIR_FIELDS}
    return AnswerPair(
        chars=len(stored["answer"]), other_chars=len(stored["other_answer"]), asked=asked, **facts
    )


def gate_difference(evaluation: Evaluation) -> dict[str, object] | None:
    """The policy's gain by the leading evidence, with the interval whose lower end the gate reads; None without a
    comparison.

    Keys: value, low, high, unit, kind, confidence, attempt. Pages, cards and commands all show this one.
    """
    evidence, bounds = evidence_of(evaluation), gate_bounds(evaluation.agent)
    lead = lead_of(evidence, bounds)
    effect = effect_of(lead, evidence.items(lead))
    if effect is None:
        return None
    return {
        **gate_interval(effect, evidence, bounds).as_dict(),
        "unit": effect.unit,
        "kind": lead,
        "confidence": 1 - 2 * alpha_of_attempt(bounds.alpha, evidence.attempt),
        "attempt": evidence.attempt,
    }


# --- Looks at the holdout ---


def attempt_of(evaluation: Evaluation) -> int:
    """Number of an evaluation among the looks at its agent's holdout, from 1, which sets the alpha it may spend.

    Every evaluation on the holdout since the rival became champion counts, as its figures may have picked the policy:
    with or without a comparison or a gate. Those against the rival always count, those of the rival never. A test file
    counts if it holds prompts of the holdout. The same policy on the same prompts, judged alike, is one look; other
    prompts (`--max-samples`), rewards or weights make another. From the first evaluation of a linear policy on, each
    classifier shown beside a policy counts too, as it can be promoted itself.
    """
    looks = Evaluation.objects.filter(
        Q(split="holdout") | Q(figures__holdout_prompts__gt=0), agent=evaluation.agent, pk__lte=evaluation.pk
    )
    if (began := _champion_since(evaluation.agent, evaluation.against)) is not None:
        looks = looks.filter(Q(against=evaluation.against) | Q(created_at__gte=began))
    looks = looks.exclude(policy__isnull=False, policy__name=evaluation.against)
    subjects: set[str] = set()
    classifiers: set[str] = set()
    paid = 0
    for *subject, base_model, classifier in looks.order_by("pk").values_list(
        "policy_id",
        "checkpoint",
        "snapshot_id",
        "samples",
        "figures__order",
        "base_model",
        "figures__baseline__trained_on",
    ):
        subjects.add(json.dumps(subject, sort_keys=True))
        if classifier is not None:
            classifiers.add(json.dumps(classifier, sort_keys=True))
        if not base_model:  # a linear policy has none
            paid = len(classifiers)
    return max(len(subjects) + paid, 1)


def order_facts(
    options: Mapping[str, object], weights: Path | None, test_data: Path | None
) -> dict[str, object]:
    """Facts that distinguish evaluations of one policy on the same prompts; stored in the figures.

    options: as asked; unset ones are left out. weights: file of an unregistered checkpoint, whose folder may change.
    """
    facts = {name: value for name, value in options.items() if value}
    if weights is not None:
        facts["weights"] = file_sum(weights)
    if test_data is not None:
        facts["test_data"] = file_sum(test_data)
    return facts


def holdout_prompts(agent: str, hashes: Collection[str]) -> int:
    """How many of these prompts are in the agent's holdout."""
    held_out = PromptSplit.objects.filter(agent=agent, split=PromptSplit.Split.HOLDOUT)
    return sum(held_out.filter(prompt_hash__in=chunk).count() for chunk in chunks(set(hashes)))


def _champion_since(agent: str, name: str) -> datetime.datetime | None:
    """When a policy became champion; None for the base model, and for one that never was."""
    moves = PolicyEvent.objects.filter(policy__agent=agent, policy__name=name, to_stage=Policy.Stage.CHAMPION)
    return moves.order_by("-pk").values_list("created_at", flat=True).first()


# --- Benchmark results ---


NO_MODEL = {
    Policy.Kind.LINEAR: "a linear policy has no language model, so benchmarks of language models do not apply to it",
    Policy.Kind.HOSTED: "benchmarks need log-probabilities of a base model, which a hosted model does not give",
    Policy.Kind.RECORDED: "it is known by its recorded answers alone, so that it cannot be asked",
}


def no_benchmarks(policy: Policy) -> str:
    """Why benchmarks do not apply to a policy; empty if they do."""
    return NO_MODEL.get(Policy.Kind(policy.kind), "")


def benchmarks_newest(policy: Policy, tasks: Sequence[str] | None = None) -> list[BenchmarkResult]:
    """The newest result of each task (or of `tasks`), by name; items are loaded only if tasks are named."""
    rows = policy.benchmarks.order_by("-pk")
    rows = rows.defer("items") if tasks is None else rows.filter(task__in=tasks)
    newest: dict[str, BenchmarkResult] = {}
    for row in rows:
        newest.setdefault(row.task, row)
    return [newest[task] for task in sorted(newest)]


def benchmark_stale(result: BenchmarkResult) -> str:
    """Why a result is outdated: its task's files changed; empty if they did not. Hub tasks are known by
    version only."""
    if result.source == HUB:
        return ""
    try:
        task = task_folder(result.task if result.source in (BUNDLED, INSTALLED) else result.source)
    except TaskRefused as refusal:
        return str(refusal)
    if task is None:
        return f"{result.task} is no longer part of this version or of an installed package"
    if task.sha256 != result.task_sha256:
        return f"the task {result.task} has changed since it was run ({result.created_at:%Y-%m-%d %H:%M} UTC)"
    return ""


def benchmark_command(policy: Policy, task: str, source: str = BUNDLED) -> str:
    """The command that runs a task for a policy."""
    spec = task if source in (BUNDLED, INSTALLED, HUB) else source
    hub = " --hub" if source == HUB else ""
    return f"{PROGRAM} benchmark_model --policy {policy.name} --tasks {spec}{hub}"


def gate_benchmarks(policy: Policy, tasks: Sequence[str]) -> dict[str, Any]:
    """Benchmark fields of `Evidence`: each listed task's cases, or why they do not count."""
    if words := no_benchmarks(policy):
        return {"no_benchmarks": words}
    newest = {row.task: row for row in benchmarks_newest(policy, tasks)}
    cases: dict[str, BenchmarkCases] = {}
    for task in tasks:
        row = newest.get(task)
        if row is None:
            fault = f"{task} was not run: run `{benchmark_command(policy, task)}`"
            cases[task] = BenchmarkCases(fault=fault)
        elif stale := benchmark_stale(row):
            fault = f"{stale}: run `{benchmark_command(policy, task, row.source)}`"
            cases[task] = BenchmarkCases(fault=fault)
        else:
            pairs = zip(row.items["own"], row.items["base"], strict=True)
            cases[task] = BenchmarkCases(row.metric, [Case(own, base) for own, base in pairs])
    return {"benchmarks": cases}


def benchmark_summary(result: BenchmarkResult) -> dict[str, object]:
    """A result for REST, `--json` and cards, without its items."""
    return {
        "task": result.task,
        "version": result.task_version,
        "sha256": result.task_sha256,
        "source": result.source if result.source in (BUNDLED, INSTALLED, HUB) else "folder",
        "harness": result.harness,
        "metric": result.metric,
        "fewshot": result.fewshot,
        "chat_template": result.chat_template,
        "limit": result.items_limit,
        "n": result.n,
        **result.figures,
        "stale": benchmark_stale(result),
        "seconds": round(result.seconds, 1),
        "created_at": result.created_at.isoformat(),
    }


def benchmark_text(result: BenchmarkResult) -> str:
    """A result in one sentence."""
    own, base, difference = (result.figures[part] for part in ("own", "base", "difference"))
    return (
        f"{result.task} ({result.metric}): {100 * own['value']:.1f} % ± {100 * own['stderr']:.1f}, base "
        f"{100 * base['value']:.1f} % ± {100 * base['stderr']:.1f}; {100 * difference['value']:+.1f} points "
        f"[{100 * difference['low']:+.1f}, {100 * difference['high']:+.1f}] on the same {result.n} items"
    )
