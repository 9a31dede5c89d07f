"""Is a policy better? Figures on held-out evidence of every kind, and of its answers, alone or against another."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.agents.base import Agent
from rl.evidence_kinds import (
    CORRECTIONS,
    KINDS,
    KNOWN,
    LABELS,
    OUTCOMES,
    PAIRS,
    TESTS,
    all_alike,
    lead_kind,
    telling_counts,
)
from rl.gate_sheets import GateBounds
from rl.judgements import NEUTRAL
from rl.statistics import mcnemar_exact, mean_interval, paired_difference, wilson_interval
from rl.training.evaluate_answers import (
    AnswerJudge,
    HeldOutPrompt,
    Reward,
    Rows,
    answers_given,
    answers_written,
    errors_of,
    held_out_prompts,
    loops,
    slices_of,
)
from rl.training.evaluate_evidence import (
    CHECKED,
    GENERATED,
    Check,
    OtherEvidence,
    Scored,
    agreement_check,
    answered_evidence,
    known_check,
    rated_evidence,
    response_of,
    rows_scored,
    side_figure,
    written_evidence,
)
from rl.training.evaluate_liked import Verdicts, liked_difference, liked_share, verdicts_on
from rl.training.linear_side import LinearSide, Options, choice_scores
from rl.training.policy import Generation, LoadedPolicy, reference_load
from rl.training.result import TrainingRefused
from rl.training.scoring import ResponseScore, head_check, score_pairs, score_responses

ANSWERED = 200
"""Prompts that are answered where there are as many: of 200 answers a fall of five valid ones in a hundred is seen."""

CHUNK = 64
"""Pairs or prompts worked on between two calls of `progress`."""


@dataclass
class _Side:
    """What one policy did with the held-out evidence."""

    scores: list[tuple[ResponseScore, ResponseScore]]
    """Of the pairs."""
    responses: list[ResponseScore]
    """Of the rated and written answers, in the order of `rows_scored`."""
    answers: list[Generation]
    problems: list[str | None]
    """Per answer, why it is not valid."""
    rewards: list[float]
    written: dict[int, Generation]
    """Of the prompts whose answer was chosen out of a list, by number, what it writes without one."""

    @property
    def prefers(self) -> list[bool]:
        return [chosen.logp > rejected.logp for chosen, rejected in self.scores]


def evaluate_policy(
    policy: LoadedPolicy | LinearSide,
    pairs: Sequence[Mapping[str, Any]] = (),
    *,
    agent: Agent,
    others: Rows | None = None,
    checks: Mapping[str, Check] | None = None,
    barred: Mapping[str, str] | None = None,
    needed: int = GateBounds.min_evidence,
    against: LoadedPolicy | LinearSide | str | None = None,
    baseline: LinearSide | None = None,
    max_samples: int | None = None,
    generate_samples: int = ANSWERED,
    spare: Sequence[Mapping[str, Any]] = (),
    reward: Reward | None = None,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Evaluate on held-out pairs {"prompt", "chosen", "rejected", "state"?} and other evidence; JSON-serialisable.

    - preference_accuracy: share of pairs where log p(chosen | prompt) > log p(rejected | prompt), summed over the
      tokens, not length-normalised; a tie counts as not preferred. Beside it the same per token. None without a pair.
    - valid_rate: share of answers as the agent is served (the likeliest of its closed set or of what a row's `state`
      lists, else written greedily), one to each of the first `generate_samples` distinct prompts, that the agent can
      act on; `written` has it for what is written where answers are chosen, and with a row's `state` a written choice
      must be one it lists. Where the evidence has fewer prompts, those of `spare` ({"prompt", "state"?}, never trained
      on) are answered too.
    - average_reward: mean of `reward(row, answer)` over those answers. Without a reward function, of prompts that
      people judged: 1 for an answer they preferred, 0 for one they only rejected or that is not valid, 0.5 for others.
    - rewards_known: answers that this says anything of; 0 where free text matched nothing that anybody judged.
    - liked: share of the answers that people would like (rl.training.evaluate_liked), or None where nobody rated one.
    - ground_truth: share of answers that are right, over the prompts whose right answer the agent knows, or None.
    - evidence: per kind (rl.evidence_kinds.KINDS) its figures; `carried_by` names the kind that carries the
      comparison: see `lead_kind`, with `needed` prompts and without the kinds that are `barred` (with the reason why).

    others: kind -> rows. labels and outcomes: {"prompt", "completion", "score"}; corrections: {"prompt", "completion"};
    tests and rewards: {"prompt"}, whose answers `checks[kind]` gives values. `max_samples` limits each kind.

    baseline: a linear policy learnt from the same training rows; `baseline` then holds its figures on it.

    Shares are {"value", "low", "high", "n"} with 95 % intervals: Wilson for shares, Student's t for the reward.
    `against` is "base" (the same model without its adapter; of a linear policy the base model has to be given, loaded)
    or another policy; both then get the same prompts, and
    `comparison` holds the other's figures and the paired difference with its p-value: of pairs Newcombe's and the exact
    McNemar test, of other kinds as in `rl.gate_effects`. `progress` is called with (done, total) work items. With a
    comparison, `held_out` holds what a gate asks: `cases`, one per pair, `others`, the items of each other kind, and
    `answers`, one per prompt asked. Raises TrainingRefused without evidence.
    """
    rows = list(pairs)[:max_samples]
    more = {kind: list(found)[:max_samples] for kind, found in (others or {}).items() if found}
    if not rows and not more:
        raise TrainingRefused(
            "expected at least one held-out pair or rated answer to evaluate on, found none"
        )
    if isinstance(against, str) and against != "base":
        raise ValueError(f"expected against='base' or a loaded policy, found {against!r}")
    judge = AnswerJudge(agent, reward)
    checks = {KNOWN: known_check(judge), **(checks or {})}
    for kind in GENERATED:
        if kind in more and kind not in checks:
            raise ValueError(f"expected a check for the answers to {kind} prompts, found none")
    try:
        prompts = held_out_prompts({PAIRS: rows, **more})
        scored = rows_scored(more, agent)
        for number, (_, row) in enumerate(scored):
            response_of(row, number)
    except ValueError as error:
        raise TrainingRefused(str(error)) from error
    work = _Work(
        rows,
        scored,
        _asked(prompts, more, agent, generate_samples, spare),
        judge,
        batch_size,
    )
    linear = next((side for side in (policy, against) if isinstance(side, LinearSide)), None)
    if linear is not None:
        work.options = linear.options
    rated = any(kind in (LABELS, OUTCOMES) for kind, _ in scored)
    base_needed = rated and policy.adapter is not None and linear is None
    sides = 2 if against is not None else 1
    extra = len(scored) if base_needed and against != "base" else 0
    tick = _Ticker(progress, sides * work.size + extra)
    own, other, name = _side(policy, work, tick), None, ""
    if against is not None and not isinstance(against, str):
        other, name = _side(against, work, tick), against.adapter or against.base_model
    elif against is not None:
        if isinstance(policy, LinearSide):
            raise ValueError("a linear policy has no base: expected the base model loaded as `against`")
        with policy.without_adapter():
            other, name = _side(policy, work, tick), "base"
    if linear is not None:
        references = (
            _own_reference(policy, own, work),
            _own_reference(against, other, work) if other is not None else _own_reference(policy, own, work),
        )
    else:
        assert not isinstance(policy, LinearSide)
        base = own.responses if not base_needed else None
        if against == "base" and other is not None:
            base = other.responses
        elif base_needed:
            with policy.without_adapter():
                base = _responses(policy, work, tick)
        assert base is not None
        references = (
            _reference_responses(policy, base, work),
            _reference_responses(against, base, work) if isinstance(against, LoadedPolicy) else base,
        )
    evidence = _other_evidence(work, more, checks, own, other, references)
    counts = {PAIRS: len(rows)} | {kind: one.figures["prompts"] for kind, one in evidence.items()}
    alike = [
        kind for kind in (LABELS, OUTCOMES) if all_alike(float(row["score"]) for row in more.get(kind, ()))
    ]
    counts = telling_counts({kind: n for kind, n in counts.items() if kind not in (barred or {})}, alike)
    lead = lead_kind(counts, needed)
    outcome: dict[str, Any] = {
        "base_model": policy.base_model,
        "samples": len(rows) if lead == PAIRS else len(evidence[lead].stored) if lead in evidence else 0,
        "prompts_answered": len(work.asked),
        **_figures(work, own),
        "length_normalised": False,
        "liked": liked_share(work.asked, work.verdicts(own)),
        "carried_by": lead,
        "evidence": _evidence_figures(rows, own, other, evidence, barred or {}),
        "ground_truth": work.judge.ground_truth(work.asked, own.answers),
        "truncated": sum(score.truncated for pair in own.scores for score in pair)
        + sum(score.truncated for score in own.responses),
        "errors": errors_of(rows, own.scores, work.asked, own.answers, work.judge, own.written),
    }
    if baseline is not None:
        outcome["baseline"] = _baseline(baseline, work, more, checks, own, references[0], lead)
    if other is not None:
        outcome["comparison"] = _comparison(work, name, own, other, lead, evidence)
        outcome["comparison"]["ground_truth"] = work.judge.ground_truth(work.asked, other.answers)
        outcome["held_out"] = _held_out(work, own, other, evidence)
    return outcome


@dataclass
class _Work:
    """What every side is asked."""

    rows: Sequence[Mapping[str, Any]]
    scored: Sequence[Scored]
    asked: Sequence[HeldOutPrompt]
    judge: AnswerJudge
    batch_size: int
    options: Options | None = None
    """Options that rated answers are measured among, on both sides, where one of them is linear."""

    @property
    def listed(self) -> list[int]:
        """Numbers of the prompts that list what may be answered, so that an answer is chosen. Not those of an agent
        whose answers are one closed set, which is never written."""
        agent = self.judge.agent
        return [
            i
            for i, prompt in enumerate(self.asked)
            if not agent.answers and agent.choices(prompt.row.get("state"))
        ]

    @property
    def judged(self) -> list[bool]:
        """Per prompt asked, whether its reward can tell a good answer from a bad one."""
        return [
            bool(self.judge.custom or prompt.liked or prompt.disliked or prompt.written)
            for prompt in self.asked
        ]

    def verdicts(self, side: _Side) -> Verdicts:
        """What people said of the answers of a side, by number of the prompt."""
        return verdicts_on(self.asked, [answer.text for answer in side.answers], self.judge)

    def rewards(self, side: _Side) -> list[float]:
        """Rewards of the answers to prompts that were judged; of all, where none was."""
        known = [reward for reward, told in zip(side.rewards, self.judged, strict=True) if told]
        return known or side.rewards

    @property
    def size(self) -> int:
        return len(self.rows) + len(self.scored) + len(self.asked)


def _asked(
    prompts: Sequence[HeldOutPrompt],
    rows: Rows,
    agent: Agent,
    generate_samples: int,
    spare: Sequence[Mapping[str, Any]],
) -> list[HeldOutPrompt]:
    """The prompts that are answered: the first of all, those whose answers themselves are evidence, spare ones."""
    first = list(prompts[: max(generate_samples, 0)])
    if generate_samples <= 0:
        return first
    known = {prompt.key for prompt in first}
    kinds = [*GENERATED, *([CORRECTIONS] if agent.discrete else [])]
    for kind in kinds:
        keys = {prompt.key for prompt in held_out_prompts({kind: rows.get(kind, ())})}
        wanted = [prompt for prompt in prompts if prompt.key in keys][:CHECKED]
        first += [prompt for prompt in wanted if prompt.key not in known]
        known |= {prompt.key for prompt in wanted}
    more = [one for one in held_out_prompts({TESTS: spare}) if one.key not in known]
    return first + more[: max(generate_samples - len(first), 0)]


def _other_evidence(
    work: _Work,
    rows: Rows,
    checks: Mapping[str, Check],
    own: _Side,
    other: _Side | None,
    references: tuple[Sequence[ResponseScore], Sequence[ResponseScore]],
) -> dict[str, OtherEvidence]:
    """Evidence of every kind beside pairs. Alone, rated answers are compared with the base, the others with nothing.

    references: scores of the rated answers by the reference of either side, see `_reference_responses`.
    """
    found: dict[str, OtherEvidence] = {}
    for kind in dict.fromkeys(kind for kind, _ in work.scored):
        at = [i for i, (one, _) in enumerate(work.scored) if one == kind]
        of = [work.scored[i][1] for i in at]
        mine = [own.responses[i] for i in at]
        from_mine, from_theirs = ([scores[i] for i in at] for scores in references)
        theirs = [other.responses[i] for i in at] if other is not None else from_theirs
        if kind == CORRECTIONS:
            found[kind] = written_evidence(of, mine, theirs if other is not None else mine)
        else:
            found[kind] = rated_evidence(kind, of, mine, theirs, from_mine, from_theirs)
    answered = {prompt.key: i for i, prompt in enumerate(work.asked)}
    for kind in KINDS:
        if kind in found or kind not in rows:
            continue
        wanted = [one for one in held_out_prompts({kind: rows[kind]}) if one.key in answered]
        at = [answered[prompt.key] for prompt in wanted]
        check = agreement_check(wanted, work.judge) if kind == CORRECTIONS else checks[kind]
        texts = [own.answers[i].text for i in at]
        against = [other.answers[i].text for i in at] if other is not None else texts
        found[kind] = answered_evidence(kind, wanted, texts, against, check)
    return found


class _Ticker:
    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, items: int) -> None:
        self.done += items
        if self.progress is not None:
            self.progress(self.done, self.total)


def _side(policy: LoadedPolicy | LinearSide, work: _Work, tick: _Ticker) -> _Side:
    rows, asked, judge, batch_size = work.rows, work.asked, work.judge, work.batch_size
    if not isinstance(policy, LinearSide):
        head_check(policy)
    scores: list[tuple[ResponseScore, ResponseScore]] = []
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        if isinstance(policy, LinearSide):
            scores += policy.pairs(part)
        else:
            scores += score_pairs(policy, part, batch_size=batch_size)
        tick(len(part))
    responses = _responses(policy, work, tick)
    answers: list[Generation] = []
    for start in range(0, len(asked), CHUNK):
        chunk = asked[start : start + CHUNK]
        answers += answers_given(
            policy,
            [prompt.messages for prompt in chunk],
            judge.agent,
            states=[prompt.row.get("state") for prompt in chunk],
            batch_size=batch_size,
        )
        tick(len(chunk))
    problems = [judge.problem(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
    rewards = [
        judge.reward(prompt, answer.text, problem)
        for prompt, answer, problem in zip(asked, answers, problems, strict=True)
    ]
    written: dict[int, Generation] = {}
    if not isinstance(policy, LinearSide):
        at = work.listed
        texts = answers_written(policy, [asked[i].messages for i in at], judge.agent, batch_size=batch_size)
        written = dict(zip(at, texts, strict=True))
    return _Side(scores, responses, answers, problems, rewards, written)


def _responses(policy: LoadedPolicy | LinearSide, work: _Work, tick: _Ticker) -> list[ResponseScore]:
    rows = [row for _, row in work.scored]
    if isinstance(policy, LinearSide) or work.options is not None:
        tick(len(rows))
        if isinstance(policy, LinearSide):
            return policy.responses(rows)
        assert work.options is not None
        return choice_scores(policy, rows, work.options, batch_size=work.batch_size)
    found: list[ResponseScore] = []
    for start in range(0, len(work.scored), CHUNK):
        items = [response_of(row, 0) for _, row in work.scored[start : start + CHUNK]]
        found += score_responses(policy, items, batch_size=work.batch_size)
        tick(len(items))
    return found


def _reference_responses(
    policy: LoadedPolicy, base: Sequence[ResponseScore], work: _Work
) -> Sequence[ResponseScore]:
    """Scores of the rated answers by the reference that a policy was trained against: the base's, or its warm-up's."""
    rated = any(kind in (LABELS, OUTCOMES) for kind, _ in work.scored)
    reference = reference_load(policy) if rated else None
    if reference is None:
        return base
    return _responses(reference, work, _Ticker(None, 0))


def _own_reference(
    policy: LoadedPolicy | LinearSide | str | None, side: _Side, work: _Work
) -> Sequence[ResponseScore]:
    """Scores of the rated answers by the reference of one side, where a side is linear: the even choice, or the model
    that an adapter was trained against."""
    if isinstance(policy, LinearSide):
        return policy.reference([row for _, row in work.scored])
    assert isinstance(policy, LoadedPolicy)
    if policy.adapter is None:
        return side.responses
    if (reference := reference_load(policy)) is not None:
        return _responses(reference, work, _Ticker(None, 0))
    with policy.without_adapter():
        return _responses(policy, work, _Ticker(None, 0))


def _baseline(
    baseline: LinearSide,
    work: _Work,
    rows: Rows,
    checks: Mapping[str, Check],
    own: _Side,
    reference: Sequence[ResponseScore],
    lead: str,
) -> dict[str, Any]:
    """Figures of a simple classifier on the same evidence, and how the policy differs from it.

    `policy` has those of the policy by the same measure: rated answers by how far each moved them from its own
    reference, whatever the policy is compared with beside.
    """
    side = _side(baseline, work, _Ticker(None, 0))
    even = baseline.reference([row for _, row in work.scored])
    evidence = _other_evidence(work, rows, checks, side, None, (even, even))
    alone = _other_evidence(work, rows, checks, own, None, (reference, reference))
    gains = [mine - theirs for mine, theirs in zip(work.rewards(own), work.rewards(side), strict=True)]
    found = {
        **_figures(work, side),
        "carried_by": lead,
        "evidence": _evidence_figures(work.rows, side, None, evidence, {}),
        "policy": {
            **_figures(work, own),
            "carried_by": lead,
            "evidence": _evidence_figures(work.rows, own, None, alone, {}),
        },
        "average_reward_difference": mean_interval(gains, bounds=(-1.0, 1.0)).as_dict(),
    }
    if side.scores:
        found["preference_accuracy_difference"] = _pairs_difference(own, side)
    return found


def _figures(work: _Work, side: _Side) -> dict[str, Any]:
    per_token = sum(chosen.mean_logp > rejected.mean_logp for chosen, rejected in side.scores)
    valid = sum(problem is None for problem in side.problems)
    accuracy = {
        "preference_accuracy": sum(side.prefers),
        "preference_accuracy_length_normalised": per_token,
    }
    n, rewards = len(side.scores), work.rewards(side)
    return {
        **{name: wilson_interval(right, n).as_dict() if n else None for name, right in accuracy.items()},
        "valid_rate": wilson_interval(valid, len(side.problems)).as_dict(),
        "average_reward": mean_interval(rewards, bounds=(0.0, 1.0)).as_dict(),
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else None,
        "rewards_known": len(rewards) if work.judge.custom else sum(reward != NEUTRAL for reward in rewards),
        **({"written": _written_figures(work, side)} if side.written else {}),
    }


def _written_figures(work: _Work, side: _Side) -> dict[str, Any]:
    """The same figures of what it writes to the prompts whose answers are chosen from a list when it is served."""
    asked = [work.asked[i] for i in side.written]
    texts = list(side.written.values())
    problems = [work.judge.problem(prompt, text) for prompt, text in zip(asked, texts, strict=True)]
    rewards = [
        work.judge.reward(prompt, text.text, problem)
        for prompt, text, problem in zip(asked, texts, problems, strict=True)
    ]
    judged = work.judged
    known = [reward for i, reward in zip(side.written, rewards, strict=True) if judged[i]]
    return {
        "valid_rate": wilson_interval(problems.count(None), len(problems)).as_dict(),
        "average_reward": mean_interval(known or rewards, bounds=(0.0, 1.0)).as_dict(),
        "ground_truth": work.judge.ground_truth(asked, texts),
    }


def _pairs_difference(own: _Side, other: _Side) -> dict[str, Any]:
    verdicts = list(zip(own.prefers, other.prefers, strict=True))
    both, neither = verdicts.count((True, True)), verdicts.count((False, False))
    b, c = verdicts.count((True, False)), verdicts.count((False, True))
    return {
        "difference": paired_difference(both, b, c, neither).as_dict(),
        "p_value": mcnemar_exact(b, c),
        "b": b,
        "c": c,
    }


def _comparison(
    work: _Work, name: str, own: _Side, other: _Side, lead: str, evidence: Mapping[str, OtherEvidence]
) -> dict[str, Any]:
    """The other side's figures; difference and p-value are of the kind that carries the comparison."""
    gains = [mine - theirs for mine, theirs in zip(work.rewards(own), work.rewards(other), strict=True)]
    if lead in evidence:
        figures = evidence[lead].figures
        carried = {part: figures.get(part) for part in ("difference", "p_value", "unit")}
    else:
        carried = _pairs_difference(own, other) if own.scores else {"difference": None, "p_value": None}
        carried["unit"] = "points"
    return {
        "against": name,
        **_figures(work, other),
        "liked": liked_share(work.asked, work.verdicts(other)),
        "liked_difference": liked_difference(work.asked, work.verdicts(own), work.verdicts(other)),
        "kind": lead,
        **carried,
        "average_reward_difference": mean_interval(gains, bounds=(-1.0, 1.0)).as_dict(),
    }


def _evidence_figures(
    rows: Sequence[Mapping[str, Any]],
    own: _Side,
    other: _Side | None,
    evidence: Mapping[str, OtherEvidence],
    barred: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Per kind that there is, its figures; of one side alone where nothing is compared."""
    found: dict[str, dict[str, Any]] = {}
    if rows:
        n = len(rows)
        pairs: dict[str, Any] = {"prompts": n, "unit": "points", "value": sum(own.prefers) / n}
        if other is not None:
            pairs |= {"against_value": sum(other.prefers) / n, **_pairs_difference(own, other)}
        found[PAIRS] = pairs
    for kind in KINDS:
        if kind in evidence:
            figures = dict(evidence[kind].figures)
            if other is None and kind not in (LABELS, OUTCOMES):
                figures = {"prompts": figures["prompts"]}
            if kind not in (LABELS, OUTCOMES):
                figures["own"] = side_figure(kind, evidence[kind].stored, "own")
            found[kind] = figures
        if kind in found and kind in barred:
            found[kind]["barred"] = barred[kind]
    return found


def _held_out(work: _Work, own: _Side, other: _Side, evidence: Mapping[str, OtherEvidence]) -> dict[str, Any]:
    """Per item of evidence and per answer what both sides did: what the gate's rules are asked about."""
    free = not work.judge.agent.structured and not work.judge.agent.answers
    written = {
        i: {
            "written": own.written[i].text,
            "written_valid": work.judge.problem(work.asked[i], own.written[i]) is None,
            "other_written_valid": work.judge.problem(work.asked[i], other.written[i]) is None,
        }
        for i in own.written.keys() & other.written.keys()
    }
    return {
        "cases": [
            {
                "prompt_hash": row.get("prompt_hash", ""),
                "cluster": row.get("cluster", ""),
                "own": mine,
                "other": theirs,
                "slices": slices_of(row),
            }
            for row, mine, theirs in zip(work.rows, own.prefers, other.prefers, strict=True)
        ],
        "others": {kind: one.stored for kind, one in evidence.items()},
        "answers": [
            {
                "prompt_hash": prompt.row.get("prompt_hash", ""),
                "messages": prompt.messages,
                "answer": own.answers[i].text,
                "other_answer": other.answers[i].text,
                "valid": own.problems[i] is None,
                "other_valid": other.problems[i] is None,
                "reward": own.rewards[i],
                "other_reward": other.rewards[i],
                "judged": judged,
                "loops": free and loops(own.answers[i].text),
                **written.get(i, {}),
            }
            for i, (prompt, judged) in enumerate(zip(work.asked, work.judged, strict=True))
        ],
    }
