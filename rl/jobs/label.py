"""The auto-labeller: from people's ratings to suggested ratings. An entry point to the training package: torch inside
functions alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings

from feedback.messages import Message
from feedback.models import Decision, RaterKind
from feedback.rating.suggestions import ratings_accepted, suggestion_counts, suggestions_record
from feedback.selectors import agent_slugs, decisions_of, ratings_standing
from feedback.storage.problem_rows import RowReader
from feedback.storage.sql import chunks
from rl.base_models.service import agent_base_model
from rl.datasets import messages_plain
from rl.datasets.feedback_types import NEUTRAL, Split, rating_value
from rl.datasets.splits import splits_of
from rl.jobs.hardware import hardware_detect
from rl.models import LabelRun, TrainingRun
from rl.models.runs import run_folder
from rl.registry import service as registry
from rl.registry.integrity import adapter_folder
from rl.statistics import wilson_interval

if TYPE_CHECKING:
    import numpy as np

    from rl.training.labels import Item, LabelModelFit

MAX_RATINGS = 2000
"""Newest rated decisions that are learnt from."""
MAX_SUGGESTIONS = 1000
"""Decisions a rating is suggested for, unless asked otherwise."""

EMBEDDING, MARGIN, REWARD_MODEL = "text embedding", "policy margin", "reward model"


class LabelsRefused(ValueError):
    """Too few ratings, or nothing to suggest a rating for; the message says what to do."""


@dataclass(frozen=True)
class LabelRow:
    """A decision as the label model reads it."""

    pk: uuid.UUID
    prompt_hash: str
    messages: list[Message]
    response: str
    good: bool = False
    """Of a rated one: whether people found it good on average."""


def auto_label(
    agent: str,
    *,
    limit: int = MAX_SUGGESTIONS,
    base_model: str | None = None,
    seed: int = 42,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Learn from people's ratings of an agent's decisions, and suggest ratings for up to `limit` that wait for one.

    The label model reads an embedding of prompt and response. Where the agent has a champion or a reward model, what
    these say is stacked on top, fitted on held-out prompts alone, which they never saw, and used where that lowers the
    Brier score. Simulated ratings, and those that accepted a suggestion, teach nothing.
    Raises LabelsRefused, and the training package's TrainingRefused and PolicyLoadError.
    """
    from rl.training import labels
    from rl.training.policy import load_policy

    if agent not in (known := agent_slugs()):
        raise LabelsRefused(
            f"no decision of agent {agent!r} is recorded; known are {', '.join(known) or 'none yet'}"
        )
    if limit < 1:
        raise LabelsRefused(f"a limit is at least 1, found {limit}")
    rated_decisions, waiting = rated_rows(agent), waiting_rows(agent, limit)
    champion = registry.champion_of(agent)
    base = base_model or (champion.base_model if champion else "")
    base = agent_base_model(agent, given=base).name
    adapter = adapter_folder(champion) if champion and champion.base_model == base else None
    labels.labels_enough(
        [row.good for row in rated_decisions], [row.prompt_hash for row in rated_decisions]
    )  # before anything is loaded
    policy = load_policy(base, adapter, hardware=hardware_detect())
    rows = [*rated_decisions, *waiting]
    items: list[Item] = [(row.messages, row.response) for row in rows]
    read = labels.embeddings(
        policy, items, progress=(lambda done, total: progress(done, total, "")) if progress else None
    )
    good = labels.as_labels([row.good for row in rated_decisions])
    first = labels.label_fit(
        read[: len(rated_decisions)], good, [row.prompt_hash for row in rated_decisions], seed
    )
    probabilities = first.model.probabilities(read[len(rated_decisions) :]) if waiting else read[:0, 0]
    extra_features: dict[str, np.ndarray] = {}
    left_out: dict[str, str] = {}
    judge = _reward_model(agent)
    if adapter is not None:
        extra_features[MARGIN] = labels.margins(policy, items)
    else:
        left_out[MARGIN] = "the agent has no champion on this base model"
    if judge is not None:
        extra_features[REWARD_MODEL] = labels.reward_scores(judge, items)
    else:
        left_out[REWARD_MODEL] = "no reward model was trained for the agent"
    figures, features = first.figures, [EMBEDDING]
    if extra_features:
        splits = splits_of(agent, {row.prompt_hash for row in rated_decisions})
        stacked = _stack(first, rated_decisions, splits, probabilities, extra_features, good, left_out, seed)
        if stacked is not None:
            figures, probabilities = stacked
            features += list(extra_features)
    run = LabelRun.objects.create(
        agent=agent,
        base_model=base,
        path="",
        features=features,
        left_out=left_out,
        ratings=len(rated_decisions),
        figures=asdict(figures),
    )
    folder = settings.RATCHET_HOME / "labels" / agent / str(run.pk)
    facts = {"agent": agent, "base_model": base, "base_model_hash": policy.base_model_hash}
    first.model.save(folder, {**facts, "figures": asdict(first.figures)})
    labels.curve_draw(asdict(figures), folder / "calibration.png", str(run))
    found = dict(zip([row.pk for row in waiting], map(float, probabilities), strict=True))
    run.path = registry.home_relative(folder)
    run.suggested = suggestions_record(found, str(run))
    run.save(update_fields=["path", "suggested"])
    return {"labels": str(run), **label_model_summary(agent)}


def _stack(
    first: LabelModelFit,
    rated: list[LabelRow],
    splits: Mapping[str, Split],
    stated: np.ndarray,
    more: dict[str, np.ndarray],
    good: np.ndarray,
    left_out: dict[str, str],
    seed: int,
) -> tuple[Any, np.ndarray] | None:
    """Figures and suggestions with what the trained models say, where held-out ratings show that it helps."""
    import numpy as np

    from rl.training import labels
    from rl.training.result import TrainingRefused

    # the champion and the reward model learnt from these very ratings: only prompts that were held out from them tell
    # what their word is worth on a decision nobody rated
    held = [i for i, row in enumerate(rated) if splits[row.prompt_hash] != "train"]
    columns = np.concatenate(list(more.values()), axis=1)
    own = np.concatenate([labels.logits(first.fold_probabilities), columns[: len(rated)]], axis=1)[held]
    try:
        second = labels.label_fit(own, good[held], [rated[i].prompt_hash for i in held], seed)
    except TrainingRefused as refusal:
        left_out.update(dict.fromkeys(more, f"on held-out prompts: {refusal}"))
        return None
    alone = labels.figures_of(first.fold_probabilities[held], good[held])
    if second.figures.brier >= alone.brier:
        names = (
            f"no improvement: Brier {second.figures.brier:.3f} with it, {alone.brier:.3f} without, held out"
        )
        left_out.update(dict.fromkeys(more, names))
        return None
    unlabelled = np.concatenate([labels.logits(stated), columns[len(rated) :]], axis=1)
    return second.figures, second.model.probabilities(unlabelled)


def rated_rows(agent: str) -> list[LabelRow]:
    """The newest decisions that people took a side on, by their mean verdict; not those that accepted a suggestion."""
    accepted = ratings_accepted(agent)
    verdicts: dict[uuid.UUID, list[float]] = {}
    ratings = ratings_standing(agent).filter(rater_kind=RaterKind.HUMAN).order_by("-created_at", "-pk")
    for pk, decision, thumb, stars, score in ratings.values_list(
        "pk", "decision_id", "thumb", "stars", "score"
    ):
        value = rating_value(thumb, stars, score)
        if value is not None and pk not in accepted and (decision in verdicts or len(verdicts) < MAX_RATINGS):
            verdicts.setdefault(decision, []).append(value)
    means = {pk: sum(values) / len(values) for pk, values in verdicts.items()}
    sided = {pk: mean > NEUTRAL for pk, mean in means.items() if mean != NEUTRAL}
    return [row for pk in chunks(sided, 500) for row in _rows(agent, pk, sided)]


def waiting_rows(agent: str, limit: int) -> list[LabelRow]:
    """The newest decisions that no person rated."""
    waiting = decisions_of(agent).filter(ratings_human=0).order_by("-created_at", "-pk")
    ids = list(waiting.values_list("pk", flat=True)[:limit])
    return [row for chunk in chunks(ids, 500) for row in _rows(agent, chunk, {})]


def _rows(agent: str, ids: list[uuid.UUID], good: dict[uuid.UUID, bool]) -> list[LabelRow]:
    rows = Decision.objects.filter(pk__in=ids).order_by("pk")
    found = []
    reader = RowReader(agent, "labels")
    for pk, prompt_hash, messages, response in rows.values_list("pk", "prompt_hash", "messages", "response"):
        with reader.row(pk):
            plain = messages_plain(messages)
            if plain is not None and response.strip():
                found.append(LabelRow(pk, prompt_hash, plain, response, good.get(pk, False)))
    reader.save(looked_at=ids)
    return found


def _reward_model(agent: str) -> Path | None:
    """The folder of the agent's newest reward model."""
    done = TrainingRun.objects.filter(agent=agent, method="reward_model", status=TrainingRun.Status.SUCCEEDED)
    for run in done.order_by("-pk"):
        folder = run_folder(run) / "reward_model"
        if folder.is_dir():
            return folder
    return None


def labels_newest(agent: str) -> LabelRun | None:
    return LabelRun.objects.filter(agent=agent).order_by("-pk").first()


def label_model_summary(agent: str) -> dict[str, Any]:
    """Quality of an agent's newest label model, and the fate of its suggestions."""
    run, counts = labels_newest(agent), suggestion_counts(agent)
    share = wilson_interval(counts.accepted, counts.settled_count).as_dict() if counts.settled_count else None
    right = (
        wilson_interval(counts.accepted + counts.agreed, counts.settled_count).as_dict()
        if counts.settled_count
        else None
    )
    return {
        "agent": agent,
        "ratings": run.ratings if run else 0,
        "suggested": run.suggested if run else 0,
        "open": counts.open,
        "accepted": counts.accepted,
        "agreed": counts.agreed,
        "overruled": counts.overruled,
        "accepted_share": share,
        "right_share": right,
        "features": run.features if run else [],
        "left_out": run.left_out if run else {},
        "figures": run.figures if run else None,
    }
