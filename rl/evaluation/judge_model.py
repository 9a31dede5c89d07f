"""A language model as judge of a round's pairs, beside people. `rl.registry.judge_reports` measures their agreement.

Each pair is shown in both orders (Zheng et al. 2023, arXiv 2306.05685, position bias), and the verdicts are averaged. A
reply that names no side counts as a tie.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from feedback.messages import Message
from feedback.models import Decision
from feedback.storage.sql import chunks
from rl.datasets import messages_plain
from rl.evaluation.judging import AT_ONCE, AskedPrompt, Progress, policy_answers
from rl.evaluation.sides import unheard
from rl.models import JudgedPair, JudgingRound, Policy
from rl.models.agent_definitions import agent_served
from rl.registry.judging import JudgingRefused

QUESTION = (
    "Compare two answers to the conversation below. Which one helps the person who asked more? Judge content, not "
    "length or order. Reply with one letter: A, B, or T for a tie.\n\n# Conversation\n{prompt}\n\n"
    "# Answer A\n{first}\n\n# Answer B\n{second}\n\n# The better answer (A, B or T)"
)

MOST_CHARACTERS = 12_000
"""Most of a conversation, and of an answer, that the judge is shown: the end of it."""


def round_judge(judging: JudgingRound, judge: Policy, progress: Progress = unheard) -> int:
    """Have a policy judge the round's pairs that it has not judged; returns how many. Another judge begins anew.

    Raises JudgingRefused for a judge that cannot be asked, or that is a side of the round.
    """
    if judge in (judging.policy, judging.opponent):
        raise JudgingRefused(
            f"{judge.name} is a side of judging round {judging.pk}: name another policy as its judge"
        )
    if judge.kind in (Policy.Kind.RECORDED, Policy.Kind.LINEAR):
        raise JudgingRefused(f"{judge.name} cannot judge: expected a hosted model or an adapter")
    if judging.judge != judge:
        judging.pairs.update(judged=None)
        judging.judge = judge
        judging.save(update_fields=["judge"])
    pairs = list(judging.pairs.filter(same=False, judged=None).order_by("id"))
    done = 0
    for batch in chunks(pairs, AT_ONCE // 2):
        done += _judged(batch, judge)
        progress(done, len(pairs), "pairs")
    return done


def _judged(pairs: Sequence[JudgedPair], judge: Policy) -> int:
    decisions = Decision.objects.filter(withdrawal=None).in_bulk([pair.decision for pair in pairs])
    asked: list[tuple[JudgedPair, AskedPrompt]] = []
    for pair in pairs:
        decision = decisions.get(pair.decision)
        messages = messages_plain(decision.messages) if decision else None
        if messages is None:
            continue
        for sides in ((pair.answer, pair.other_answer), (pair.other_answer, pair.answer)):
            asked.append((pair, AskedPrompt(pair.decision, _question(messages, *sides), None, None)))
    texts = [
        text
        for some in policy_answers(judge, agent_served(judge.agent), [prompt for _, prompt in asked])
        for text in some
    ]
    for number in range(0, len(asked), 2):
        pair = asked[number][0]
        pair.judged = (verdict(texts[number]) - verdict(texts[number + 1])) / 2
    found = [pair for pair, _ in asked[::2]]
    JudgedPair.objects.bulk_update(found, ["judged"])
    return len(found)


def _question(messages: Sequence[Message], first: str, second: str) -> list[Message]:
    prompt = "\n\n".join(f"{one['role']}: {one['content']}" for one in messages)
    shown = [text[-MOST_CHARACTERS:] for text in (prompt, first, second)]
    content = QUESTION.format(prompt=shown[0], first=shown[1], second=shown[2])
    return [{"role": "user", "content": content}]


def verdict(reply: str | None) -> int:
    """1 if the first answer is better, -1 if the second, 0 for a tie, a refusal, and a reply that names neither."""
    named = re.search(r"(?!\bA TIE\b)\b(A|B|T|TIE)\b", (reply or "").upper().replace("ANSWER", " "))
    return {"A": 1, "B": -1}.get(named.group(1), 0) if named else 0
