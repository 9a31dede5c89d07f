"""Judge a policy on held-out prompts: entry point to `rl.training.evaluate`. Torch is imported in functions alone."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.installation import PROGRAM
from feedback.selectors import raters_by_prompt
from rl.base_models.service import agent_base_model
from rl.bundled_models import BUNDLED
from rl.datasets import DatasetRefused, snapshot_rows
from rl.datasets.demonstrations import preferred_rows
from rl.datasets.feedback_types import Row
from rl.datasets.held_out_evidence import (
    HeldOut,
    good_chars,
    held_out_of_database,
    held_out_of_file,
    held_out_of_snapshot,
    trained_prompts,
)
from rl.evaluation.off_policy import logged_choices, off_policy
from rl.evaluation.sides import (
    Check,
    HostedSide,
    barred_reason,
    baseline_of,
    is_linear,
    quantised_answerer,
    rewards_check,
    rewards_of_training,
    side_load,
    tests_check,
    unheard,
)
from rl.export.service import base_of
from rl.gates.evidence_kinds import CORRECTIONS, LABELS, PAIRS, REWARDS, TESTS
from rl.gates.report import NEWER, OLDER
from rl.linear.model import WEIGHTS as LINEAR_WEIGHTS
from rl.models import Evaluation, GoldenCase, Policy
from rl.models.agent_definitions import agent_served
from rl.recipes import PREFERRED
from rl.registry import service as registry
from rl.registry.gate_evidence import attempt_of, gate_bounds, gate_difference, holdout_prompts, order_facts
from rl.registry.incumbents import incumbent_sync, recorded_answers
from rl.registry.integrity import adapter_folder, files_check
from rl.reward_models.service import rewards_located
from rl.serving.routing import serving_settings
from rl.statistics import Difference

if TYPE_CHECKING:
    from rl.training.evaluate import Beside
    from rl.training.policy import LoadedPolicy
    from rl.training.sides import AnswersOnly, LinearSide


logger = logging.getLogger("rl.evaluation.service")


class EvaluationRefused(ValueError):
    """Nothing to judge, nothing to judge it on, or nothing to judge it against; the message says what to do."""


BASE, INCUMBENT = "base", "incumbent"
"""Values of `compare` that stand for no policy's name."""

GGUF = "gguf"
"""Value of `quantization`: answers on the base's GGUF file beside those in full precision."""


@dataclass(frozen=True)
class EvaluationOrder:
    """Order of an evaluation: a registered policy or a checkpoint folder; on which evidence; against what."""

    policy: str | None = None
    checkpoint: Path | None = None
    agent: str | None = None
    test_data: Path | None = None
    compare_base: bool = False
    compare: str | None = None
    """`incumbent` (who answers the agent's users today), `base` as `compare_base`, or a policy's name."""
    base_model: str | None = None
    quantization: str = "none"
    """`none`, `4bit`, or GGUF: the same prompts are also answered by llama.cpp on the base's quantised file."""
    max_samples: int | None = None
    rewards: str = ""
    """Specs of rewards (`--reward`), separated by commas, that judge generated answers."""
    actor: str = "evaluate_model"


def evaluate(
    order: EvaluationOrder, progress: Callable[[int, int, str], None] | None = None
) -> dict[str, object]:
    """Figures of a policy on evidence it never trained on, with their 95 % intervals; stored as an Evaluation row.

    Raises EvaluationRefused, DatasetRefused, RegistryRefused and the training package's PolicyLoadError.
    """
    report = progress or unheard
    report(0, 0, "loading the libraries")
    from rl.training.evaluate import evaluate_policy, golden_check
    from rl.training.general import general_answers
    from rl.training.scoring import kl_to_reference, written_gain
    from rl.training.sides import AGAINST, LinearSide

    if (order.policy is None) == (order.checkpoint is None):
        raise EvaluationRefused("expected either --policy NAME or --checkpoint DIR, and not both")
    if order.compare_base and order.compare:
        raise EvaluationRefused(
            "expected --compare-base or --compare POLICY, not both: one comparison at a time"
        )
    if order.compare == BASE:
        order = replace(order, compare=None, compare_base=True)
    policy = registry.policy_get(order.policy) if order.policy else None
    if policy is not None:
        files_check(policy, "evaluate")
    agent = order.agent or (policy.agent if policy else None) or _agent_of(order.checkpoint)
    champion = incumbent_sync(agent)
    rival = _rival(order, policy, champion, agent)
    bounds = gate_bounds(agent)
    reward_specs = order.rewards
    report(0, 0, "reading the held-out prompts")
    rewards = rewards_located(reward_specs, agent) if reward_specs else ""
    held_out = _held_out_rows(order, policy, agent, bounds.min_evidence)
    if not rewards and REWARDS in held_out.rows:
        reward_specs = rewards_of_training(policy)
        rewards = rewards_located(reward_specs, agent)
    checks = _checks(held_out, rewards, agent)
    reason = barred_reason(reward_specs, policy, agent) if rewards else ""
    exclusions = {REWARDS: reason} if reason else {}

    definition = agent_served(agent)

    def load(adapter: Path | None, base_model: str) -> LoadedPolicy | LinearSide:
        quantization = "none" if order.quantization == GGUF else order.quantization
        loaded = side_load(adapter, base_model, definition, quantization=quantization)
        if not isinstance(loaded, LinearSide):
            loaded.scored = {}  # an answer is asked for by several figures
        return loaded

    adapter = adapter_folder(policy) if policy else order.checkpoint
    assert adapter is not None  # one of the two was given
    linear = is_linear(adapter)
    base_model = "" if linear else order.base_model or (policy.base_model if policy else base_of(adapter))
    report(0, 0, "loading the model")
    if linear and order.quantization == GGUF:
        raise EvaluationRefused("a linear policy has no base model: evaluate it without --quantization gguf")
    against: Any = None
    if rival is not None and rival.has_files:
        against = load(adapter_folder(rival), rival.base_model)
    elif rival is not None:
        against = answers_side(rival, held_out)
        if rival.kind == Policy.Kind.RECORDED and not against.recorded:
            raise EvaluationRefused(
                f"{rival.name} has no recorded answer to any of these held-out prompts: compare with base, or take it "
                f"out of service ({PROGRAM} policy retire {rival.name})"
            )
    elif order.compare_base:
        # what would answer in its place
        against = load(None, agent_base_model(agent, given=order.base_model).name) if linear else "base"
    side = load(adapter, base_model)
    incumbent: AnswersOnly | str | None = None
    if champion is not None and champion != policy:
        incumbent = AGAINST if rival == champion else recorded_side(champion, held_out)
    base_side: Beside | str | None = None
    if linear:
        base_side = AGAINST if order.compare_base else partial(load, None, agent_base_model(agent).name)
    report(0, 0, "scoring and answering the held-out prompts")
    baseline, baseline_facts = (None, {}) if linear else baseline_of(policy, definition)

    def scored(done: int, total: int) -> None:
        report(done, total, "")
        if done == total:
            report(0, 0, "counting the right answers of each side")

    answerer, base_gguf = None, None
    stack = ExitStack()
    if order.quantization == GGUF:
        answerer, base_gguf = stack.enter_context(quantised_answerer(base_model, adapter, definition))
    with stack:
        figures = evaluate_policy(
            side,
            held_out.rows.get(PAIRS, ()),
            agent=definition,
            others={kind: rows for kind, rows in held_out.rows.items() if kind != PAIRS},
            checks=checks,
            barred=exclusions,
            needed=bounds.min_evidence,
            against=against,
            incumbent=incumbent,
            base_side=base_side,
            baseline=LinearSide(baseline, definition) if baseline is not None else None,
            max_samples=order.max_samples,
            spare=held_out.spare,
            progress=scored,
            quantised=answerer,
        )
    if base_gguf is not None:
        figures["quantised"]["base_file"] = str(base_gguf)
    report(0, 0, "measuring the distance to the base and the estimates")
    evidence = figures.pop("held_out", {})
    if not isinstance(side, LinearSide) and side.adapter is not None and base_model != BUNDLED:
        report(0, 0, "asking general prompts")
        figures["general"] = asdict(general_answers(side))
        if evidence:
            evidence["general"] = figures["general"]
        report(0, 0, "measuring the distance to the base and the estimates")
    if baseline_facts:
        figures["baseline"] = {**figures.get("baseline", {}), **baseline_facts}
    if REWARDS in figures["evidence"]:
        # as it was named: where its files lie is no figure
        figures["evidence"][REWARDS]["judge"] = reward_specs
    if evidence:
        figures["comparison"]["against"] = rival.name if rival else BASE
        figures["comparison"]["title"] = rival.title if rival else "the base model"
        answers = [(answer["messages"], answer["answer"]) for answer in evidence["answers"]]
        states = _states(held_out)
        forms = [
            definition.schema_served(states.get(answer["prompt_hash"])) for answer in evidence["answers"]
        ]
        # a closed set is not written token by token, and cannot drift
        if not definition.answers and not isinstance(side, LinearSide):
            evidence["kl"] = figures["kl"] = kl_to_reference(side, answers, forms)
        written = _written_rows(held_out, policy)[: order.max_samples]
        imitated = written or _preferred_rows(held_out, policy)[: order.max_samples]
        asked = [definition.schema_served(row.get("state")) for row in imitated]
        if not isinstance(side, LinearSide) and (gain := written_gain(side, imitated, asked)):
            evidence["written_gain"] = figures["written_gain"] = gain.as_dict()
        if good := good_chars({**held_out.rows, CORRECTIONS: written}):
            evidence["good_chars"] = good
        if cases := golden_cases(agent):
            evidence["golden"] = golden_check(side, definition, cases)
        _say_more([*evidence["cases"], *itertools.chain(*evidence["others"].values())], agent, rival)
    figures["off_policy"], difference = ON_FILE, None
    if order.test_data is None:
        figures["off_policy"], difference = _off_policy(agent, side, against)
    if evidence and difference is not None:
        evidence["off_policy"] = difference.as_dict()
    if champion is not None and champion != policy:
        figures["incumbent"] = {"name": champion.name, "title": champion.title, "kind": str(champion.kind)}
    figures = {
        "policy": policy.name if policy else str(order.checkpoint),
        "agent": agent,
        "base_model": base_model,
        "seen_in_training": held_out.trained_rows,
        "simulated_share": _simulated_share(held_out.rows.get(figures["carried_by"], ())),
        "order": {**_order_facts(order, adapter), "known": held_out.known_digest},
        "clusters": held_out.clusters,
        **figures,
    }
    if order.test_data is not None:
        prompts = {row["prompt_hash"] for rows in held_out.rows.values() for row in rows}
        figures["holdout_prompts"] = holdout_prompts(agent, prompts)
    evaluation = Evaluation.objects.create(
        agent=agent,
        policy=policy,
        checkpoint="" if policy else str(order.checkpoint),
        base_model=base_model,
        against=rival.name if rival else BASE if order.compare_base else "",
        snapshot=held_out.snapshot,
        split="file" if order.test_data else "holdout",
        samples=figures["samples"],
        figures=figures,
        evidence=evidence,
    )
    if order.test_data is None or figures["holdout_prompts"]:
        figures["look"] = attempt_of(evaluation)
    if order.test_data is None and (gated := gate_difference(evaluation)) is not None:
        figures["comparison"]["gate"] = gated
    evaluation.save(update_fields=["figures"])
    if policy is not None and order.test_data is None:
        registry.policy_evaluated(policy, evaluation, actor=order.actor)
    return {"evaluation": evaluation.pk, **figures}


def _rival(
    order: EvaluationOrder, policy: Policy | None, champion: Policy | None, agent: str
) -> Policy | None:
    """The policy to compare with; None for the base model and where nothing is compared. Raises EvaluationRefused."""
    if order.compare != INCUMBENT:
        return registry.policy_get(order.compare) if order.compare else None
    if champion is None:
        raise EvaluationRefused(
            f"{agent} has no incumbent: no champion, and no answers that its app recorded; compare with base"
        )
    if champion == policy:
        raise EvaluationRefused(
            f"{champion.name} is the incumbent itself; compare with base or another policy"
        )
    return champion


def answers_side(policy: Policy, held_out: HeldOut) -> AnswersOnly:
    """A policy without files as a side: a hosted one is asked, a recorded one has its newest recorded answers."""
    return HostedSide(policy) if policy.kind == Policy.Kind.HOSTED else recorded_side(policy, held_out)


def recorded_side(policy: Policy, held_out: HeldOut) -> AnswersOnly:
    """A policy by its newest recorded answers to the held-out prompts; nothing is asked."""
    from rl.training.sides import RecordedSide

    rows = itertools.chain(*held_out.rows.values(), held_out.spare)
    recorded = recorded_answers(policy, {row["prompt_hash"] for row in rows})
    return RecordedSide(policy.name, policy.title, recorded)


def _states(held_out: HeldOut) -> dict[str, object]:
    """State of each held-out prompt, and of those that are answered beside them, by its hash."""
    rows = itertools.chain(*held_out.rows.values(), held_out.spare)
    return {row["prompt_hash"]: row.get("state") for row in rows}


ON_FILE = {"refused": "not estimated for a file: the log is held-out data, and each use of it counts"}
"""Words in the place of the off-policy estimate of an evaluation on a file."""


def _order_facts(order: EvaluationOrder, adapter: Path) -> dict[str, object]:
    options = {
        "max_samples": order.max_samples,
        "rewards": order.rewards,
        "base_model": order.base_model,
        "quantization": order.quantization if order.quantization != "none" else None,
    }
    names = (LINEAR_WEIGHTS, "adapter_model.safetensors", "model.safetensors")
    files = [adapter / name for name in names if (adapter / name).is_file()] if order.policy is None else []
    return order_facts(options, files[0] if files else None, order.test_data)


def _off_policy(
    agent: str, loaded: LoadedPolicy | LinearSide, against: Any
) -> tuple[dict[str, object], Difference | None]:
    """Off-policy estimates of the policy and of its rival on logged choices (`rl.evaluation.off_policy`)."""
    from rl.training.scoring import score_responses
    from rl.training.sides import AnswersOnly, LinearSide

    log = logged_choices(agent)
    items = [(row.messages, response) for row in log.rows for response in row.responses]

    def score(policy: LoadedPolicy | LinearSide, adapter: bool) -> list[list[float]]:
        if isinstance(policy, LinearSide):
            return [policy.policy.log_probabilities(row.messages, row.responses) for row in log.rows]
        flat = iter(score_responses(policy, items, adapter=adapter) if items else ())
        return [[next(flat).logp for _ in row.responses] for row in log.rows]

    other = None
    if against is not None and not isinstance(against, AnswersOnly):
        other = score(loaded, False) if against == "base" else score(against, True)
    return off_policy(log, score(loaded, True), other, serving_settings(agent))


def golden_cases(agent: str) -> list[dict[str, object]]:
    """The decisions of an agent that must be right, as an evaluation asks them."""
    rows = GoldenCase.objects.filter(agent=agent, active=True)
    return [dict(row) for row in rows.values("name", "messages", "state", "accepted", "forbidden")]


def _say_more(cases: list[dict[str, Any]], agent: str, rival: Policy | None) -> None:
    """Add to each case who judged it, and whether the rival had learnt of its time: what is forgotten shows there."""
    raters = raters_by_prompt(agent, [case["prompt_hash"] for case in cases])
    known: set[str] = set()
    if rival is not None and rival.run is not None and rival.run.snapshot is not None:
        try:
            known = {row["prompt_hash"] for row in snapshot_rows(rival.run.snapshot, "holdout")}
        except DatasetRefused as refusal:
            logger.warning("forgetting cannot be told from the rest: %s", refusal)
    for case in cases:
        case["raters"] = sorted(raters.get(case["prompt_hash"], ()))
        if known:
            case["slices"].append(OLDER if case["prompt_hash"] in known else NEWER)


def _held_out_rows(order: EvaluationOrder, policy: Policy | None, agent: str, needed: int) -> HeldOut:
    """The rows to judge on, the snapshot they stand in, and how many were left out because training saw them.

    A file is used whole, less the prompts this policy was trained on. Otherwise the holdout: of the policy's own
    file where it learned from one, else of all the feedback there is now.
    """
    snapshot = policy.run.snapshot if policy and policy.run else None
    with_rewards = bool(order.rewards)
    if order.test_data is not None:
        held_out = held_out_of_file(agent, order.test_data, trained_prompts(snapshot), rewarded=with_rewards)
        if not held_out.rows and held_out.trained_rows:
            raise EvaluationRefused(
                f"all {held_out.trained_rows} rows of {order.test_data} have prompts that the policy was "
                "trained on; give a file with other prompts"
            )
        nowhere = f"{order.test_data} has no ratings, pairs or answers to evaluate on"
        next_step = "give pairs, ratings, scores or corrections: see docs/evaluate.md"
    elif snapshot is not None and snapshot.query.get("source") == "file":
        held_out = held_out_of_snapshot(snapshot, rewarded=with_rewards)
        if not with_rewards and rewards_of_training(policy) and _too_few(held_out, needed):
            held_out = held_out_of_snapshot(snapshot, rewarded=True)
        nowhere = f"the file that {policy and policy.name} was trained on has no held-out prompts"
        next_step = "give --test-data FILE"
    else:
        held_out = held_out_of_database(agent, needed, rewarded=with_rewards)
        if not with_rewards and rewards_of_training(policy) and _too_few(held_out, needed):
            # nobody judged enough of its answers: the rewards it was trained on say what they can
            held_out = held_out_of_database(agent, needed, rewarded=True)
        nowhere = (
            f"no held-out evidence for agent {agent}: about a third of the first rated prompts are held "
            "out, and none of these has a rating, a preference or a correction"
        )
        next_step = f"rate more at /rate/?agent={agent}, or give --test-data FILE"
    if not held_out.rows:
        reasons = ", ".join(
            f"{count} {reason}" for reason, count in held_out.left_out.most_common(4) if count
        )
        raise EvaluationRefused(f"{nowhere}{f' (left out: {reasons})' if reasons else ''}; {next_step}")
    return held_out


def _too_few(held_out: HeldOut, needed: int) -> bool:
    return max(held_out.counts().values(), default=0) < needed


def _written_rows(held_out: HeldOut, policy: Policy | None) -> list[Row]:
    """Held-out answers that people wrote; where the evidence has none, those of the datasets behind the policies whose
    weights this one began with: prompts with tests, after `train_sft` on solutions, hold no text of anybody's."""
    rows = held_out.rows.get(CORRECTIONS, [])
    if rows or policy is None:
        return rows
    begun = [one.run.snapshot for one in registry.policies_started(policy) if one.run and one.run.snapshot]
    trained = trained_prompts(policy.run.snapshot if policy.run else None)
    for snapshot in begun:
        try:
            trained |= trained_prompts(snapshot)
            rows = rows or held_out_of_snapshot(snapshot).rows.get(CORRECTIONS, [])
        except DatasetRefused as refusal:
            logger.warning("what people wrote for %s cannot be read: %s", policy.name, refusal)
    return [row for row in rows if row["prompt_hash"] not in trained]


def _preferred_rows(held_out: HeldOut, policy: Policy | None) -> list[Row]:
    """Held-out answers that people preferred or liked, for a policy that was shown such answers; [] for another."""
    if policy is None or policy.run is None or policy.run.recipe.get("teacher") != PREFERRED:
        return []
    if policy.run.recipe.get("feedback", "corrections") == "corrections":
        return []
    return preferred_rows([row for kind in (PAIRS, LABELS) for row in held_out.rows.get(kind, [])])


def _checks(held_out: HeldOut, rewards: str, agent: str) -> dict[str, Check]:
    """Checks of generated answers, for the kinds that need them."""
    checks: dict[str, Check] = {}
    if TESTS in held_out.rows:
        checks[TESTS] = tests_check(agent)
    if REWARDS in held_out.rows:
        checks[REWARDS] = rewards_check(rewards, agent)
    return checks


def _simulated_share(rows: Sequence[Row]) -> float:
    """Share of rows that simulated raters had a part in."""
    return sum(bool(row.get("simulated")) for row in rows) / max(len(rows), 1)


def _agent_of(checkpoint: Path | None) -> str:
    from rl.training.loading import adapter_read

    assert checkpoint is not None  # evaluate() checked
    return str(adapter_read(checkpoint).get("agent") or "assistant")
