"""Evaluation of a policy, alone or against another: figures on held-out evidence of every kind and on its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.agents.base import Agent
from rl.gates.evidence_kinds import (
    KNOWN,
    LABELS,
    OUTCOMES,
    PAIRS,
    all_alike,
    lead_kind,
    telling_counts,
)
from rl.gates.report import GateBounds
from rl.training.answer_sides import (
    AGAINST,
    AnswersOnly,
    Beside,
    kinds_scored,
    known_unasked,
    not_scored_words,
    right_of_sides,
)
from rl.training.encoding import NOT_TEXT
from rl.training.evaluate_answers import (
    AnswerJudge,
    HeldOutPrompt,
    Reward,
    Rows,
    errors_of,
    held_out_prompts,
)
from rl.training.evaluate_approval import liked_share
from rl.training.evaluate_evidence import (
    GENERATED_KINDS,
    Check,
    response_of,
    right_answer_check,
    rows_scored,
)
from rl.training.evaluate_figures import (
    answers_compared,
    baseline_figures,
    comparison_figures,
    evidence_figures,
    held_out_facts,
    pair_votes,
    pairs_of_prompts,
    side_summary,
)
from rl.training.evaluate_sides import (
    EvaluationInput,
    Ticker,
    answered_prompts,
    other_evidence,
    own_reference,
    reference_responses,
    responses_scored,
    side_answered,
    side_measured,
)
from rl.training.linear_side import LinearSide
from rl.training.policy import Generation, LoadedPolicy
from rl.training.result import TrainingRefused

MAX_ANSWERS = 200
"""Prompts that are answered, at most: 200 answers show a fall of the valid share by five points."""


def rows_written(sides: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], int]:
    """The rows with their answers as the models write them, and how many a model's chat template cannot write."""
    kept = list(rows)
    for side in sides:
        if isinstance(side, LoadedPolicy):
            kept = side.encoder.written(kept)[0]
    return kept, len(rows) - len(kept)


def evaluate_policy(
    policy: LoadedPolicy | LinearSide,
    pairs: Sequence[Mapping[str, Any]] = (),
    *,
    agent: Agent,
    others: Rows | None = None,
    checks: Mapping[str, Check] | None = None,
    barred: Mapping[str, str] | None = None,
    needed: int = GateBounds.min_evidence,
    against: LoadedPolicy | LinearSide | AnswersOnly | str | None = None,
    incumbent: AnswersOnly | str | None = None,
    base_side: Beside | str | None = None,
    baseline: LinearSide | None = None,
    quantised: Callable[[HeldOutPrompt], Generation] | None = None,
    max_samples: int | None = None,
    generate_samples: int = MAX_ANSWERS,
    spare: Sequence[Mapping[str, Any]] = (),
    reward: Reward | None = None,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Evaluate on held-out pairs {"prompt", "chosen", "rejected", "state"?} and other evidence; JSON-serialisable.

    - preference_accuracy: share of pairs where log p(chosen | prompt) > log p(rejected | prompt), summed over the
      tokens, not length-normalised; a tie counts as not preferred. The pairs of a prompt share one vote, and so do
      near-identical prompts. Beside it the same per token. None without a pair.
    - valid_rate: share of answers as the agent is served (the likeliest of its closed set or of what a row's `state`
      lists, else written greedily within its schema), one to each of the first `generate_samples` distinct prompts,
      that the agent can act on; `written` has it for what is written without list and schema, and with a row's `state`
      a written choice must be one it lists. Of `spare` ({"prompt", "state"?}, never trained on) as
      many as are missing, and half of `generate_samples` at least, are answered too.
    - average_reward: mean of `reward(row, answer)` over those answers. Without a reward function, of prompts that
      people judged: 1 for an answer they preferred, 0 for one they only rejected or that is not valid, 0.5 for others.
    - rewards_known: answers that this says anything of; 0 where free text matched nothing that anybody judged.
    - liked: share of the answers that people would like (rl.training.evaluate_approval), or None without ratings.
    - ground_truth: share of answers that are right, over the prompts whose right answer the agent knows, or None.
    - evidence: per kind (rl.gates.evidence_kinds.KINDS) its figures; `carried_by` names the kind that carries the
      comparison: see `lead_kind`, with `needed` prompts and without the kinds that are `barred` (with the reason why).

    others: kind -> rows. labels and outcomes: {"prompt", "completion", "score"}; corrections: {"prompt", "completion"};
    tests and rewards: {"prompt"}, whose answers `checks[kind]` gives values. `max_samples` limits the prompts with
    pairs and the rows of each other kind.

    baseline: a linear policy learnt from the same training rows; `baseline` then holds its figures on it.

    quantised: answers a prompt as the policy does on its quantised base; `quantised` then holds the figures of these
    answers, and how many are the policy's own.

    Shares are {"value", "low", "high", "n"} with 95 % intervals: Wilson for shares, Student's t for the reward and for
    votes that are shared.
    `against` is "base" (the same model without its adapter; of a linear policy the base model has to be given, loaded)
    or another policy; both then get the same prompts, and
    `comparison` holds the other's figures and the paired difference with its p-value: of single pairs Newcombe's and
    the exact McNemar test, else as in `rl.gates.effects`. `progress` is called with (done, total) work items. With a
    comparison, `held_out` holds what a gate asks: `cases`, one per pair, `others`, the items of each other kind, and
    `answers`, one per prompt asked. A side that gives answers alone (`rl.training.answer_sides`) is asked about the
    prompts that it answered; kinds that need its log-probabilities are then `barred`.

    `right` has the share of prompts that the policy, the incumbent (who answers the agent's users today) and the base
    answer right, where right answers are known (`rl.training.answer_sides.right_of_sides`).

    Raises TrainingRefused without evidence.
    """
    try:
        pairs, left_out = rows_written([policy, against], pairs)
        written = {kind: rows_written([policy, against], found) for kind, found in (others or {}).items()}
        spare, _ = rows_written([policy, against], spare)
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    left_out += sum(count for _, count in written.values())
    rows = pairs_of_prompts(pairs, max_samples)
    other_rows = {kind: found[:max_samples] for kind, (found, _) in written.items() if found}
    if not rows and not other_rows:
        raise TrainingRefused(
            "expected at least one held-out pair or rated answer to evaluate on, found none"
            + (
                f" ({left_out} not_text: the base model's chat template cannot write them)"
                if left_out
                else ""
            )
        )
    if isinstance(against, str) and against != "base":
        raise ValueError(f"expected against='base' or a loaded policy, found {against!r}")
    judge = AnswerJudge(agent, reward)
    checks = {KNOWN: right_answer_check(judge), **(checks or {})}
    for kind in GENERATED_KINDS:
        if kind in other_rows and kind not in checks:
            raise ValueError(f"expected a check for the answers to {kind} prompts, found none")
    try:
        prompts = held_out_prompts({PAIRS: rows, **other_rows})
        score_rows = rows_scored(other_rows, agent)
        for number, (_, row) in enumerate(score_rows):
            response_of(row, number)
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    asked = answered_prompts(prompts, other_rows, agent, generate_samples, spare)
    coverage: dict[str, Any] = {"unasked": known_unasked(prompts, other_rows, agent, asked)}
    barred = dict(barred or {})
    theirs: list[Generation] = []
    if isinstance(against, AnswersOnly):
        coverage |= {"side": against.title, "of": len(asked)}
        asked, theirs = _answered(against, asked)
        coverage["unanswered"] = coverage["of"] - len(asked)
        present = [PAIRS] if rows else []
        present += [kind for kind in other_rows if other_rows[kind]]
        reason = not_scored_words(against.title)
        barred = {kind: reason for kind in kinds_scored(agent) if kind in present} | barred
    work = EvaluationInput(rows, score_rows, asked, judge, batch_size)
    linear = next((side for side in (policy, against) if isinstance(side, LinearSide)), None)
    if linear is not None:
        work.options = linear.options
    rated = any(kind in (LABELS, OUTCOMES) for kind, _ in score_rows)
    needs_base = rated and policy.adapter is not None and linear is None
    sides = 2 if against is not None else 1
    extra = len(score_rows) if needs_base and against != "base" else 0
    tick = Ticker(progress, sides * work.size + extra)
    policy_side, reference, name = side_measured(policy, work, tick), None, ""
    if isinstance(against, AnswersOnly):
        reference, name = side_answered(theirs, work), against.name
        tick(work.size)
    elif against is not None and not isinstance(against, str):
        reference, name = side_measured(against, work, tick), against.adapter or against.base_model
    elif against is not None:
        if isinstance(policy, LinearSide):
            raise ValueError("a linear policy has no base: expected the base model loaded as `against`")
        with policy.without_adapter():
            reference, name = side_measured(policy, work, tick), "base"
    if linear is not None:
        references = (
            own_reference(policy, policy_side, work),
            own_reference(against, reference, work)
            if reference is not None and not isinstance(against, AnswersOnly)
            else own_reference(policy, policy_side, work),
        )
    else:
        assert not isinstance(policy, LinearSide)
        base = policy_side.responses if not needs_base else None
        if against == "base" and reference is not None:
            base = reference.responses
        elif needs_base:
            with policy.without_adapter():
                base = responses_scored(policy, work, tick)
        assert base is not None
        references = (
            reference_responses(policy, base, work),
            reference_responses(against, base, work) if isinstance(against, LoadedPolicy) else base,
        )
    evidence = other_evidence(work, other_rows, checks, policy_side, reference, references)
    counts = {PAIRS: pair_votes(rows)} | {kind: one.figures["prompts"] for kind, one in evidence.items()}
    alike = [
        kind
        for kind in (LABELS, OUTCOMES)
        if all_alike(float(row["score"]) for row in other_rows.get(kind, ()))
    ]
    counts = telling_counts({kind: n for kind, n in counts.items() if kind not in barred}, alike)
    lead = lead_kind(counts, needed, discrete=agent.discrete)
    outcome: dict[str, Any] = {
        "base_model": policy.base_model,
        "samples": counts.get(PAIRS, 0)
        if lead == PAIRS
        else len(evidence[lead].records)
        if lead in evidence
        else 0,
        "prompts_answered": len(work.prompts),
        "left_out": {NOT_TEXT: left_out} if left_out else {},
        **side_summary(work, policy_side),
        "length_normalised": False,
        "liked": liked_share(work.prompts, work.verdicts(policy_side)),
        "carried_by": lead,
        "evidence": evidence_figures(work, policy_side, reference, evidence, barred),
        "ground_truth": work.judge.ground_truth(work.prompts, policy_side.answers),
        "truncated": sum(score.truncated for pair in policy_side.scores for score in pair)
        + sum(score.truncated for score in policy_side.responses),
        "errors": errors_of(
            rows,
            policy_side.scores,
            work.prompts,
            policy_side.answers,
            work.judge,
            policy_side.free_generations,
        ),
    }
    if any(coverage.get(name) for name in ("unasked", "unanswered")):
        outcome["coverage"] = coverage
    if baseline is not None:
        outcome["baseline"] = baseline_figures(
            baseline, work, other_rows, checks, policy_side, references[0], lead
        )
    if quantised is not None:
        outcome["quantised"] = answers_compared(work, policy_side, [quantised(one) for one in work.prompts])
    if reference is not None:
        outcome["comparison"] = comparison_figures(work, name, policy_side, reference, lead, evidence)
        outcome["comparison"]["ground_truth"] = work.judge.ground_truth(work.prompts, reference.answers)
        outcome["held_out"] = {
            **held_out_facts(work, policy_side, reference, evidence, other_rows.get(KNOWN, ())),
            "barred": barred,
        }
    outcome["right"] = right_of_sides(
        work,
        other_rows,
        checks,
        policy,
        policy_side,
        reference,
        incumbent,
        AGAINST if against == "base" else base_side,
    )
    return outcome


def _answered(
    side: AnswersOnly, prompts: Sequence[HeldOutPrompt]
) -> tuple[list[HeldOutPrompt], list[Generation]]:
    """The prompts that a side answered, and its answers. Raises TrainingRefused where it answered none."""
    found = [
        (prompt, answer) for prompt, answer in zip(prompts, side.answers(prompts), strict=True) if answer
    ]
    if not found:
        raise TrainingRefused(
            f"{side.name} has no recorded answer to any of the {len(prompts)} held-out prompts: compare with base"
        )
    return [prompt for prompt, _ in found], [answer for _, answer in found]
