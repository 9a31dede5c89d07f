"""Evaluation of a policy, alone or against another: figures on held-out evidence of every kind and on its answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.agents.base import Agent, Message, Row
from rl.gates.evidence_kinds import (
    CORRECTIONS,
    KNOWN,
    LABELS,
    OUTCOMES,
    PAIRS,
    TESTS,
    all_alike,
    lead_kind,
    telling_counts,
)
from rl.gates.report import GateBounds
from rl.statistics import wilson_interval
from rl.statistics.intervals import Figure
from rl.training.chat_template import prompt_messages, response_text
from rl.training.encoding import NOT_TEXT
from rl.training.evaluate_figures import (
    HeldOutWork,
    Measured,
    answered_prompts,
    pair_votes,
    pairs_of_prompts,
)
from rl.training.held_out import (
    GENERATED_KINDS,
    AnswerJudge,
    Check,
    HeldOutPrompt,
    Rows,
    held_out_prompts,
    right_answer_check,
    rows_scored,
)
from rl.training.policy import Generation, LoadedPolicy
from rl.training.result import TrainingRefused
from rl.training.scoring import ResponseScore
from rl.training.sides import (
    AGAINST,
    AnswersOnly,
    LinearSide,
    Measurable,
    ModelSide,
    Options,
    generate_answers,
    kinds_scored,
    side_of,
)

MAX_ANSWERS = 200
"""Prompts that are answered, at most: 200 answers show a fall of the valid share by five points."""

MAX_ERRORS = 20
"""Sample errors kept."""

Beside = Callable[[], LoadedPolicy | LinearSide]
"""Loads a base model. Called only where its answers can be judged."""


def evaluate_policy(
    policy: LoadedPolicy | LinearSide,
    pairs: Sequence[Row] = (),
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
    spare: Sequence[Row] = (),
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Evaluate on held-out pairs {"prompt", "chosen", "rejected", "state"?} and other evidence; JSON-serialisable.

    What is given:

    - others: kind -> rows. labels and outcomes: {"prompt", "completion", "score"}; corrections: {"prompt",
      "completion"}; tests and rewards: {"prompt"}, whose answers `checks[kind]` gives values.
    - barred: kind -> reason why it may not carry the comparison; needed: prompts it takes to carry it (`lead_kind`).
    - against: "base" (the same model without its adapter; of a linear policy the base model has to be given, loaded) or
      another policy. Both then get the same prompts. A side that gives answers alone is asked about the prompts that it
      answered; kinds that need its log-probabilities are then barred.
    - incumbent, base_side: sides beside whose right answers are counted; AGAINST where it is the side compared with.
    - baseline: a linear policy learnt from the same training rows. quantised: answers a prompt on the quantised base.
    - max_samples limits the prompts with pairs and the rows of each other kind, generate_samples the prompts answered.
      Of `spare` ({"prompt", "state"?}, never trained on) as many as are missing, and half of `generate_samples` at
      least, are answered too.
    - progress is called with (done, total) work items.

    What is returned (shares are {"value", "low", "high", "n"} with 95 % intervals):

    - preference_accuracy: share of pairs where log p(chosen | prompt) > log p(rejected | prompt), summed over the
      tokens; a tie counts as not preferred. The pairs of a prompt share one vote, and so do near-identical prompts.
    - valid_rate: share of answers, as the agent is served, that it can act on; `written` has it for what is written
      without list and schema.
    - average_reward, of prompts that people judged: 1 for an answer they preferred, 0 for one they only rejected or
      that is not valid, 0.5 for others; rewards_known, the answers that it says anything of; liked, the share of
      answers that people would like; ground_truth, of right ones; right, the same of policy, incumbent and base.
    - evidence: per kind its figures; `carried_by` names the kind that carries the comparison.
    - comparison: the other's figures and the paired difference with its p-value. held_out: what a gate asks of it.

    Raises TrainingRefused without evidence.
    """
    if isinstance(against, str) and against != "base":
        raise ValueError(f"expected against='base' or a loaded policy, found {against!r}")
    judge = AnswerJudge(agent)
    checks = {KNOWN: right_answer_check(judge), **(checks or {})}
    sides = [side for side in (policy, against) if isinstance(side, LoadedPolicy)]
    others, (kept_spare, _) = others or {}, _written(sides, spare)
    rows, other_rows, left_out = _readable(sides, pairs, others, max_samples)
    prompts = _checked_prompts(rows, other_rows, agent)
    for kind in GENERATED_KINDS:
        if kind in other_rows and kind not in checks:
            raise ValueError(f"expected a check for the answers to {kind} prompts, found none")
    asked = answered_prompts(prompts, other_rows, agent, generate_samples, kept_spare)
    coverage: dict[str, Any] = {"unasked": known_unasked(prompts, other_rows, agent, asked)}
    barred = dict(barred or {})
    theirs: list[Generation] = []
    if isinstance(against, AnswersOnly):
        coverage |= {"side": against.title, "of": len(asked)}
        asked, theirs = _answered(against, asked)
        coverage["unanswered"] = coverage["of"] - len(asked)
        reason = f"{against.title} gives answers and no log-probabilities"
        present = {PAIRS: rows, **other_rows}
        barred = {kind: reason for kind in kinds_scored(agent) if present.get(kind)} | barred
    work = HeldOutWork(rows, other_rows, asked, judge, checks)
    linear = next((side for side in (policy, against) if isinstance(side, LinearSide)), None)
    options = linear.options if linear is not None else None
    tick = _Ticker(progress, (2 if against is not None else 1) * work.size)
    side, rival = side_of(policy, agent, options), None
    own, other, name = work.measured(side, tick), None, ""
    if isinstance(against, AnswersOnly):
        other, name = work.answered(theirs), against.name
        tick(work.size)
    elif against is not None:
        rival = _rival(side, against, agent, options)
        with rival.speaking():
            other, name = work.measured(rival, tick), rival.name
    references = _references(work, side, own, rival, other)
    evidence = work.evidence(own, other, references)
    counts = {PAIRS: pair_votes(rows)} | {kind: one.figures["prompts"] for kind, one in evidence.items()}
    rated = (LABELS, OUTCOMES)
    alike = [kind for kind in rated if all_alike(float(row["score"]) for row in other_rows.get(kind, ()))]
    counts = telling_counts({kind: n for kind, n in counts.items() if kind not in barred}, alike)
    lead = lead_kind(counts, needed, discrete=agent.discrete)
    carried = len(evidence[lead].records) if lead in evidence else 0
    outcome: dict[str, object] = {
        "base_model": policy.base_model,
        "samples": counts.get(PAIRS, 0) if lead == PAIRS else carried,
        "prompts_answered": len(work.prompts),
        "left_out": {NOT_TEXT: left_out} if left_out else {},
        **work.summary(own),
        "liked": work.liked(own),
        "carried_by": lead,
        "evidence": work.evidence_figures(own, other, evidence, barred),
        "ground_truth": judge.ground_truth(work.prompts, own.answers),
        "truncated": own.truncated,
        "errors": errors_of(work, own),
        "right": right_of_sides(
            work, policy, own, other, incumbent, AGAINST if against == "base" else base_side
        ),
    }
    if any(coverage.get(name) for name in ("unasked", "unanswered")):
        outcome["coverage"] = coverage
    if baseline is not None:
        outcome["baseline"] = work.baseline(baseline, own, references[0], lead)
    if quantised is not None:
        outcome["quantised"] = work.answers_compared(own, [quantised(one) for one in work.prompts])
    if other is not None:
        outcome["comparison"] = work.comparison(name, own, other, lead, evidence)
        facts = work.held_out_facts(own, other, evidence, other_rows.get(KNOWN, ()))
        outcome["held_out"] = {**facts, "barred": barred}
    return outcome


def _written(sides: Sequence[LoadedPolicy], rows: Sequence[Row]) -> tuple[list[Row], int]:
    """The rows with their answers as the models write them, and how many a model's chat template cannot write. Raises
    TrainingRefused for rows of another shape."""
    kept = list(rows)
    try:
        for side in sides:
            kept = side.encoder.written(kept)[0]
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    return kept, len(rows) - len(kept)


def _readable(
    sides: Sequence[LoadedPolicy], pairs: Sequence[Row], others: Rows, max_samples: int | None
) -> tuple[list[Row], dict[str, list[Row]], int]:
    """The pairs and the other rows that every model can write, and how many were left out."""
    kept, left_out = _written(sides, pairs)
    other_rows = {}
    for kind, found in others.items():
        some, missing = _written(sides, found)
        left_out += missing
        if some:
            other_rows[kind] = some[:max_samples]
    rows = pairs_of_prompts(kept, max_samples)
    if not rows and not other_rows:
        why = f" ({left_out} not_text: the base model's chat template cannot write them)" if left_out else ""
        raise TrainingRefused(
            f"expected at least one held-out pair or rated answer to evaluate on, found none{why}"
        )
    return rows, other_rows, left_out


def _checked_prompts(rows: Sequence[Row], other_rows: Rows, agent: Agent) -> list[HeldOutPrompt]:
    """The distinct prompts of the rows. Raises TrainingRefused for a row of another shape."""
    try:
        for number, (_, row) in enumerate(rows_scored(other_rows, agent)):
            prompt_messages(row, number)
            response_text(row, "completion", number)
        return held_out_prompts({PAIRS: rows, **other_rows})
    except ValueError as error:
        raise TrainingRefused(str(error)) from error


def _rival(
    side: Measurable, against: LoadedPolicy | LinearSide | str, agent: Agent, options: Options | None
) -> Measurable:
    if not isinstance(against, str):
        return side_of(against, agent, options)
    if isinstance(side, LinearSide):
        raise ValueError("a linear policy has no base: expected the base model loaded as `against`")
    return dataclasses.replace(side, bare=True)


def _references(
    work: HeldOutWork, side: Measurable, own: Measured, rival: Measurable | None, other: Measured | None
) -> tuple[Sequence[ResponseScore], Sequence[ResponseScore]]:
    """Scores of the rated answers by the reference that either side was trained against; empty where none is rated."""
    if not work.rated:
        return (), ()
    rows = [row for _, row in work.score_rows]
    if isinstance(side, ModelSide) and side.is_base:
        mine: Sequence[ResponseScore] = own.responses
    elif isinstance(rival, ModelSide) and rival.bare and other is not None and not side.has_reference:
        mine = other.responses
    else:
        mine = side.reference(rows)
    if rival is None or other is None or rival.shares_reference(side):
        return mine, mine
    return mine, other.responses if rival.is_base else rival.reference(rows)


class _Ticker:
    """Count of the work items done, reported to `progress` with their total."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, items: int) -> None:
        self.done += items
        if self.progress is not None:
            self.progress(self.done, self.total)


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


# --- Right answers ------------------------------------------------------------------------------------------


def known_kind(rows: Rows, agent: Agent) -> str:
    """The kind of evidence that tells right answers from wrong ones; empty where none does."""
    kinds = (KNOWN, *([CORRECTIONS] if agent.discrete else []), TESTS)
    return next((kind for kind in kinds if rows.get(kind)), "")


def known_unasked(
    prompts: Sequence[HeldOutPrompt], rows: Rows, agent: Agent, asked: Sequence[HeldOutPrompt]
) -> int:
    """Prompts with a known right answer that no side is asked, because there are more than MAX_CHECKS."""
    kind = known_kind(rows, agent)
    if not kind or not asked:
        return 0
    keys = {prompt.key for prompt in held_out_prompts({kind: rows[kind]})} & {one.key for one in prompts}
    return len(keys - {prompt.key for prompt in asked})


def right_of_sides(
    work: HeldOutWork,
    policy: LoadedPolicy | LinearSide,
    own: Measured,
    other: Measured | None,
    incumbent: AnswersOnly | str | None,
    base: Beside | str | None,
) -> dict[str, Figure]:
    """`policy`, `incumbent`, `base` -> share of the held-out prompts that it answered right; empty where no right
    answer is known. A side that cannot be asked is left out.

    other: the side compared with; `incumbent` and `base` are AGAINST where it is theirs. base: None for the policy's
    own model without its adapter.
    """
    if not (kind := known_kind(work.others, work.agent)):
        return {}
    asked, places, check = work.checked(kind)

    def of(side: Measured) -> list[Generation | None]:
        return [side.answers[place] for place in places]

    def answers_of(model: LoadedPolicy | LinearSide) -> list[Generation | None]:
        states = [prompt.row.get("state") for prompt in asked]
        return list(generate_answers(model, [prompt.messages for prompt in asked], work.agent, states=states))

    sides = {"policy": of(own)}
    if incumbent == AGAINST and other is not None:
        sides["incumbent"] = of(other)
    elif isinstance(incumbent, AnswersOnly):
        sides["incumbent"] = incumbent.answers(asked)
    if base == AGAINST and other is not None:
        sides["base"] = of(other)
    elif callable(base):
        sides["base"] = answers_of(base())
    elif isinstance(policy, LoadedPolicy) and policy.adapter is not None:
        with policy.without_adapter():
            sides["base"] = answers_of(policy)
    shares = {}
    for name, answers in sides.items():
        answered = [
            (prompt.row, one.text) for prompt, one in zip(asked, answers, strict=True) if one is not None
        ]
        values = check([row for row, _ in answered], [text for _, text in answered]) if answered else ()
        known = [value for value in values if value is not None]
        if known:
            shares[name] = wilson_interval(sum(value >= 1 for value in known), len(known)).as_dict()
    return shares


def golden_check(
    policy: LoadedPolicy | LinearSide, agent: Agent, cases: Sequence[Row]
) -> list[dict[str, object]]:
    """Answer each {"name", "messages", "state"?, "accepted", "forbidden"} greedily and say whether it is right.

    Right is an answer the agent can act on that does what one of `accepted` does (any, where there are none) and
    nothing that `forbidden` lists.
    """
    states = [case.get("state") for case in cases]
    answers = generate_answers(policy, [case["messages"] for case in cases], agent, states=states)
    judge, found = AnswerJudge(agent), []
    for case, answer in zip(cases, answers, strict=True):
        why = judge.problem(HeldOutPrompt(list(case["messages"]), case), answer) or ""
        if not why and case["accepted"] and not judge.does_one_of(answer.text, case["accepted"]):
            why = "not one of the accepted answers"
        if not why and judge.does_one_of(answer.text, case["forbidden"]):
            why = "a forbidden answer"
        found.append({"name": case["name"], "passed": not why, "answer": answer.text, "why": why})
    return found


def errors_of(work: HeldOutWork, side: Measured) -> list[dict[str, str]]:
    """Sample errors, the gravest kind first: answers that are not valid, answers people rejected, wrong preferences,
    and what is not valid only where it is written without the list it is chosen from."""
    invalid, rejected, misses, strays = [], [], [], []

    def error(messages: Sequence[Message], answer: str, expected: str, reason: str) -> dict[str, str]:
        return {"prompt": messages[-1]["content"], "answer": answer, "expected": expected, "reason": reason}

    for prompt, answer, problem in zip(work.prompts, side.answers, side.problems, strict=True):
        said = prompt.messages, answer.text, prompt.expected
        if problem is not None:
            invalid.append(error(*said, f"not a valid answer: {problem}"))
        elif work.judge.opinion(prompt, answer.text) == 0.0:
            rejected.append(error(*said, "people rejected this answer"))
    for number, (row, (good, bad)) in enumerate(zip(work.pairs, side.scores, strict=True)):
        if not good.logp > bad.logp:
            wrong, right = (response_text(row, one, number) for one in ("rejected", "chosen"))
            reason = f"finds the rejected response {bad.logp - good.logp:.2f} nats more likely"
            misses.append(error(prompt_messages(row, number), wrong, right, reason))
    for number, answer in side.free_generations.items():
        prompt = work.prompts[number]
        if (problem := work.judge.problem(prompt, answer)) is not None:
            reason = f"not valid as free text (served answers are chosen or within a schema): {problem}"
            strays.append(error(prompt.messages, answer.text, side.answers[number].text, reason))
    return [*invalid, *rejected, *misses, *strays][:MAX_ERRORS]
