"""Figures of an evaluation: of one side, of two compared, of a baseline classifier, and the evidence that gates
read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rl.datasets.feedback_types import NEUTRAL
from rl.datasets.known_answers import RIGHT, WRONG
from rl.gates.effects import TableEffect, effect_of, items_of
from rl.gates.evidence_kinds import KINDS, LABELS, OUTCOMES, PAIRS
from rl.gates.report import Case
from rl.statistics import mcnemar_exact, mean_interval, wilson_interval
from rl.training.answer_sides import kinds_scored
from rl.training.evaluate_answers import HeldOutPrompt, Rows, loops, slices_of
from rl.training.evaluate_approval import liked_difference, liked_share
from rl.training.evaluate_evidence import Check, OtherEvidence, hash_of, side_figure
from rl.training.evaluate_sides import EvaluationInput, Side, Ticker, other_evidence, side_measured
from rl.training.linear_side import LinearSide
from rl.training.policy import Generation
from rl.training.scoring import ResponseScore


def side_summary(work: EvaluationInput, side: Side) -> dict[str, Any]:
    """Figures of one side, shares and means with their 95 % intervals."""
    per_token = [chosen.mean_logp > rejected.mean_logp for chosen, rejected in side.scores]
    valid = sum(problem is None for problem in side.problems)
    accuracy = {
        "preference_accuracy": side.prefers,
        "preference_accuracy_length_normalised": per_token,
    }
    rewards = work.rewards(side)
    return {
        **{name: pairs_share(work, right) if right else None for name, right in accuracy.items()},
        "valid_rate": wilson_interval(valid, len(side.problems)).as_dict(),
        "average_reward": mean_interval(rewards, bounds=(0.0, 1.0)).as_dict(),
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else None,
        "rewards_known": len(rewards) if work.judge.custom else sum(reward != NEUTRAL for reward in rewards),
        **({"written": written_figures(work, side)} if side.free_generations else {}),
    }


def written_figures(work: EvaluationInput, side: Side) -> dict[str, Any]:
    """The same figures of what it writes to the prompts whose answers are chosen from a list when it is served."""
    prompts = [work.prompts[i] for i in side.free_generations]
    texts = list(side.free_generations.values())
    problems = [work.judge.problem(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    rewards = [
        work.judge.reward(prompt, text.text, problem)
        for prompt, text, problem in zip(prompts, texts, problems, strict=True)
    ]
    rewardable = work.rewardable
    known = [reward for i, reward in zip(side.free_generations, rewards, strict=True) if rewardable[i]]
    return {
        "valid_rate": wilson_interval(problems.count(None), len(problems)).as_dict(),
        "average_reward": mean_interval(known or rewards, bounds=(0.0, 1.0)).as_dict(),
        "ground_truth": work.judge.ground_truth(prompts, texts),
    }


def answers_compared(work: EvaluationInput, side: Side, answers: Sequence[Generation]) -> dict[str, Any]:
    """Figures of a side's answers given another way (on its quantised base), and the share that does the same."""
    judge, prompts = work.judge, work.prompts
    problems = [judge.problem(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    rewards = [
        judge.reward(prompt, answer.text, problem)
        for prompt, answer, problem in zip(prompts, answers, problems, strict=True)
    ]
    known = [reward for reward, is_known in zip(rewards, work.rewardable, strict=True) if is_known]
    same = sum(
        judge.action(own.text) == judge.action(other.text)
        for own, other in zip(side.answers, answers, strict=True)
    )
    return {
        "same_answers": wilson_interval(same, len(answers)).as_dict(),
        "valid_rate": wilson_interval(problems.count(None), len(problems)).as_dict(),
        "average_reward": mean_interval(known or rewards, bounds=(0.0, 1.0)).as_dict(),
        "ground_truth": judge.ground_truth(prompts, answers),
    }


def pair_cases(work: EvaluationInput, own: Side, other: Side) -> list[dict[str, Any]]:
    """Items of the pairs as they are stored: whether the preferred response is the more likely one to each side."""
    return [
        {
            "prompt_hash": hash_of(row),
            "cluster": row.get("cluster", ""),
            "own": mine,
            "other": theirs,
            "slices": slices_of(row),
        }
        for row, mine, theirs in zip(work.rows, own.prefers, other.prefers, strict=True)
    ]


def pair_votes(rows: Sequence[Mapping[str, Any]]) -> int:
    """Votes that rows with pairs have: distinct prompts, near-identical ones as one."""
    return len({row.get("cluster") or hash_of(row) for row in rows})


def pairs_of_prompts(rows: Sequence[Mapping[str, Any]], prompts: int | None) -> list[Mapping[str, Any]]:
    """The rows of the first so many prompts; all without a number."""
    first = list(dict.fromkeys(map(hash_of, rows)))[:prompts]
    wanted = set(first)
    return [row for row in rows if hash_of(row) in wanted]


def pairs_share(work: EvaluationInput, right: Sequence[bool]) -> dict[str, Any]:
    """Share of pairs held the right way round, with its 95 % interval: one vote for each prompt or cluster.

    Wilson's interval where all pairs of a prompt agree, as they do where each has one; else Student's over prompts.
    """
    votes = [
        {
            "prompt_hash": hash_of(row),
            "cluster": row.get("cluster", ""),
            "own": one,
            "other": one,
            "slices": (),
        }
        for row, one in zip(work.rows, right, strict=True)
    ]
    values = [float(item.policy_score) for item in items_of(votes) if isinstance(item, Case)]
    if all(value in (0.0, 1.0) for value in values):
        return wilson_interval(round(math.fsum(values)), len(values)).as_dict()
    return mean_interval(values, bounds=(0.0, 1.0)).as_dict()


def pairs_difference(work: EvaluationInput, own: Side, other: Side) -> dict[str, Any]:
    """Paired difference of two sides on the same pairs, one vote for each prompt or cluster, and its two-sided p.

    Where every vote is right or wrong: Newcombe's interval, the discordant counts `b` and `c` and McNemar's exact p.
    """
    effect = effect_of(PAIRS, items_of(pair_cases(work, own, other)))
    assert effect is not None  # pairs are never all rated alike
    found: dict[str, Any] = {"difference": effect.interval(0.95).as_dict()}
    if isinstance(effect, TableEffect):
        p_value = mcnemar_exact(effect.wins, effect.losses)
        return found | {"p_value": p_value, "b": effect.wins, "c": effect.losses}
    return found | {"p_value": min(1.0, 2 * min(effect.better(), effect.worse()))}


def comparison_figures(
    work: EvaluationInput, name: str, own: Side, other: Side, lead: str, evidence: Mapping[str, OtherEvidence]
) -> dict[str, Any]:
    """The other side's figures; difference and p-value are of the kind that carries the comparison."""
    gains = [mine - theirs for mine, theirs in zip(work.rewards(own), work.rewards(other), strict=True)]
    if lead in evidence:
        figures = evidence[lead].figures
        carried = {part: figures.get(part) for part in ("difference", "p_value", "unit")}
    else:
        carried = (
            pairs_difference(work, own, other) if other.scores else {"difference": None, "p_value": None}
        )
        carried["unit"] = "points"
    return {
        "against": name,
        **side_summary(work, other),
        "liked": liked_share(work.prompts, work.verdicts(other)),
        "liked_difference": liked_difference(work.prompts, work.verdicts(own), work.verdicts(other)),
        "kind": lead,
        **carried,
        "average_reward_difference": mean_interval(gains, bounds=(-1.0, 1.0)).as_dict(),
    }


def evidence_figures(
    work: EvaluationInput,
    own: Side,
    other: Side | None,
    evidence: Mapping[str, OtherEvidence],
    barred: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Figures of each kind of evidence that is present; of one side alone where nothing is compared, and of a kind that
    is scored where the other side has no log-probabilities."""
    alone = kinds_scored(work.judge.agent) if other is not None and other.answers_only else ()
    figures_by_kind: dict[str, dict[str, Any]] = {}
    if work.rows:
        share = pairs_share(work, own.prefers)
        pairs: dict[str, Any] = {
            "prompts": share["n"],
            "pairs": len(work.rows),
            "unit": "points",
            "value": share["value"],
        }
        if other is not None and PAIRS not in alone:
            against = pairs_share(work, other.prefers)["value"]
            pairs |= {"against_value": against, **pairs_difference(work, own, other)}
        figures_by_kind[PAIRS] = pairs
    for kind in KINDS:
        if kind in evidence:
            figures = dict(evidence[kind].figures)
            if (other is None or kind in alone) and kind not in (LABELS, OUTCOMES):
                figures = {name: figures[name] for name in ("prompts", "fields") if name in figures}
            if kind not in (LABELS, OUTCOMES):
                figures["own"] = side_figure(kind, evidence[kind].records, "own")
            figures_by_kind[kind] = figures
        if kind in figures_by_kind and kind in barred:
            figures_by_kind[kind]["barred"] = barred[kind]
    return figures_by_kind


def held_out_facts(
    work: EvaluationInput,
    own: Side,
    other: Side,
    evidence: Mapping[str, OtherEvidence],
    known: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Per item of evidence and per answer what both sides did: the input of the gate's rules. known: held-out rows with
    their lists of right and wrong answers."""
    lists = {hash_of(row): row for row in known}
    free = not work.judge.agent.structured and not work.judge.agent.answers
    alone = kinds_scored(work.judge.agent) if other.answers_only else ()
    generations = {
        i: {
            "written": own.free_generations[i].text,
            "written_valid": work.judge.problem(work.prompts[i], own.free_generations[i]) is None,
            "other_written_valid": work.judge.problem(work.prompts[i], other.free_generations[i]) is None,
        }
        for i in own.free_generations.keys() & other.free_generations.keys()
    }
    return {
        "discrete": work.judge.agent.discrete,
        "cases": [] if other.answers_only else pair_cases(work, own, other),
        "others": {kind: one.records for kind, one in evidence.items() if kind not in alone},
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
                "judged": is_rewardable and _both_judged(work, own.rewards[i], other, i),
                "loops": free and loops(own.answers[i].text),
                **answers_known(work, prompt, own.answers[i].text, other.answers[i].text, lists),
                **generations.get(i, {}),
            }
            for i, (prompt, is_rewardable) in enumerate(zip(work.prompts, work.rewardable, strict=True))
        ],
    }


def _both_judged(work: EvaluationInput, reward: float, other: Side, number: int) -> bool:
    """False where nobody judged one of the answers and the other side's are recorded: what people rate is mostly the
    recorded answer, so that half a point for what nobody saw would count against every policy that differs."""
    is_known = reward != NEUTRAL and other.rewards[number] != NEUTRAL
    return is_known or not other.answers_only or work.judge.custom is not None


def answers_known(
    work: EvaluationInput, prompt: HeldOutPrompt, own: str, other: str, lists: Mapping[str, Mapping[str, Any]]
) -> dict[str, bool]:
    """Whether two answers to a held-out prompt do the same, whether people said anything of it and of the other answer,
    and whether its right answer is known; empty for free text and for prompts that are not held out."""
    judge = work.judge
    if not judge.agent.discrete or prompt.row.get("split", "holdout") != "holdout":
        return {}
    said = lists.get(prompt.row.get("prompt_hash", ""), {})
    right, wrong = said.get(RIGHT, ()), said.get(WRONG, ())
    return {
        "same": judge.does_one_of(own, [other]),
        "said": bool(right or wrong),
        "other_said": judge.does_one_of(other, [*right, *wrong]),
        "settled": bool(right),
    }


def baseline_figures(
    baseline: LinearSide,
    work: EvaluationInput,
    rows: Rows,
    checks: Mapping[str, Check],
    own: Side,
    reference: Sequence[ResponseScore],
    lead: str,
) -> dict[str, Any]:
    """Figures of a simple classifier on the same evidence, and how the policy differs from it.

    `policy` has those of the policy by the same measure: rated answers by how far each moved them from its own
    reference, whatever the policy is compared with beside.
    """
    side = side_measured(baseline, work, Ticker(None, 0))
    even = baseline.reference([row for _, row in work.score_rows])
    evidence = other_evidence(work, rows, checks, side, None, (even, even))
    alone = other_evidence(work, rows, checks, own, None, (reference, reference))
    gains = [mine - theirs for mine, theirs in zip(work.rewards(own), work.rewards(side), strict=True)]
    result = {
        **side_summary(work, side),
        "carried_by": lead,
        "evidence": evidence_figures(work, side, None, evidence, {}),
        "policy": {
            **side_summary(work, own),
            "carried_by": lead,
            "evidence": evidence_figures(work, own, None, alone, {}),
        },
        "average_reward_difference": mean_interval(gains, bounds=(-1.0, 1.0)).as_dict(),
    }
    if side.scores:
        result["preference_accuracy_difference"] = pairs_difference(work, own, side)
    return result
