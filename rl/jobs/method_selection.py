"""The training method that fits the feedback an agent has: the one meaning of `auto` and of `rlhf`, for commands, REST,
pages and the online learner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from django.conf import settings

from rl.agents import AGENTS
from rl.agents.base import Agent, names_values
from rl.bundled_models import BUNDLED
from rl.datasets import DatasetRefused, PreparedDataset, prepare_training_dataset
from rl.datasets.builder import FEWEST_ROWS
from rl.datasets.demonstrations import preferred_rows
from rl.datasets.feedback_types import Row
from rl.datasets.rows import RowRules, recorded_prompts
from rl.datasets.teachers import coverage, newest_prompts, teacher_log
from rl.linear.model import CLOSED, FIELDS, LISTED
from rl.linear.rows import LinearRefused, prompts_teachable
from rl.models.agent_definitions import agent_served
from rl.recipes import DATASET_CONFIG, DISTIL, PREFERRED, SFT_STAGE, STAGE_STARTS
from rl.recipes.base import Method
from rl.recipes.methods import METHODS, RLHF, method_named
from rl.recipes.reward_model import AUTO as AUTO_ARCHITECTURE
from rl.recipes.sft import ANSWER, EXAMPLE_SOURCES
from rl.rewards.answers import COLUMNS as ANSWER_COLUMNS
from rl.rewards.catalogue import AUTO
from rl.rewards.code_execution import EXPECTED_OUTPUTS, TESTS

PAIRED_SHARE = 0.25
"""Share of the judged responses that must stand in pairs for DPO: below, most of what people said stands on single
responses, which only KTO hears."""

FEWEST_OF_A_KIND = 3
"""Good and bad responses, each, that KTO needs to weigh one against the other."""

HUMAN_SOURCES = ("correction", "demonstration", "demonstrations")
"""Sources of rows whose response a person wrote or showed as the one to give."""


@dataclass(frozen=True)
class MethodChoice:
    """A method, why it was taken, and the knobs without which it would be another one."""

    method: str
    why: str
    """What the feedback holds, or who asked for it."""
    knobs: dict[str, Any] = field(default_factory=dict)
    taken_as: str = ""
    """The name by which `auto` took it; empty where it was asked for."""

    @property
    def reason(self) -> str:
        return f"auto took {self.taken_as}: {self.why}" if self.taken_as else self.why

    @property
    def definition(self) -> Method:
        return method_named(self.method)


@dataclass(frozen=True)
class TrainingPlan:
    """Trainings for an agent, in their order, each with its reason; those before the last are its stages. Of the
    policies they make the best on the eval split is kept."""

    agent: str
    trainings: tuple[MethodChoice, ...]

    @property
    def main(self) -> MethodChoice:
        """The run."""
        return self.trainings[-1]


def training_plan(agent: str, wanted: str = "auto", *, base_model: str = "") -> TrainingPlan:
    """What `auto` would train: a linear policy where answers are a choice or objects, SFT on what people wrote and
    liked, and a preference method after it where preferences and dislikes carry more. A named method stands alone.

    Raises as `method_chosen` does.
    """
    main = method_chosen(agent, wanted, base_model=base_model)
    trainings = [main]
    if (start := main.knobs.get("start_from")) in STAGE_STARTS:
        shown = "one policy's answers" if start == DISTIL else "what people wrote and liked"
        first = MethodChoice("sft", f"first stage of {main.method}: {shown}", dict(STAGE_STARTS[start]))
        trainings.insert(0, first)
    if wanted == "auto" and main.method != LINEAR and (beside := linear_beside(agent, base_model)):
        trainings.insert(0, beside)
    return TrainingPlan(agent, tuple(trainings))


def linear_beside(agent: str, base_model: str) -> MethodChoice | None:
    """The linear policy that is trained with a run of `auto`; None for wordings, and where prompts are few: beside a
    real base it costs seconds, and is only kept where it is ahead on the eval split."""
    chosen = method_chosen(agent, LINEAR)
    try:
        rows = prepare_training_dataset(agent, kind=chosen.knobs["feedback"], dry_run=True)
        prompts, mode = prompts_teachable(rows.rows("train"), agent_served(agent))
    except (DatasetRefused, LinearRefused):
        return None
    if prompts < (FEWEST_PROMPTS[mode] if base_model == BUNDLED else FEWEST_BESIDE):
        return None
    what = "objects, learnt field by field" if mode == FIELDS else "a choice"
    return MethodChoice(
        LINEAR, f"seconds, without a base model: answers are {what}, {prompts:,} prompts", chosen.knobs
    )


def method_chosen(
    agent: str,
    wanted: str = "auto",
    *,
    base_model: str = "",
    min_samples: int | None = None,
    **source: Any,
) -> MethodChoice:
    """The method of that name; `rlhf` is PPO with the reward `auto`, `reward_model` has the objective its feedback
    asks for, `linear` learns from the feedback that `auto` would; for `auto`, whichever fits the feedback found.

    In this order: SFT where people wrote responses, and at least as many as other feedback on other prompts tells it
    nothing of (preferences, dislikes); DPO where pairs are enough and hold a quarter of the judged responses; KTO where
    good and bad responses are enough; DPO with any pairs that are enough; SFT on demonstrations and liked responses;
    `rlhf` where responses have scores or rewards and nothing else; GRPO where nobody said anything and the prompts have
    right answers or tests; DPO where nothing is enough, whose refusal says what is missing.

    What people wrote is never left out: DPO and KTO start from SFT on it (`start_from=sft`). Where they would train the
    bundled base on JSON of several values, SFT on the preferred answers takes their place: that base must first learn
    to write them. `base_model` is what would be trained, where that is known; `source` is where the feedback is, as
    `prepare_training_dataset` takes it.

    Raises RecipeError for an unknown name.
    """
    need, served = DATASET_CONFIG["min_samples"] if min_samples is None else min_samples, agent_served(agent)

    def prepare(kind: str) -> PreparedDataset | None:
        return _prepare(agent, kind, need, source)

    if wanted == RLHF:
        why = "rlhf was asked for: a reward model, then PPO; SFT first where the base model gives few valid answers"
        return MethodChoice("ppo", why, {"reward": AUTO})
    if wanted == DISTIL:
        return _distil(agent, prepare, need)
    if wanted == REWARD_MODEL:
        return _reward_model(served, need, source, base_model)
    if wanted == LINEAR:
        like = method_chosen(agent, "auto", min_samples=min_samples, **source)
        feedback = LINEAR_FEEDBACK.get(like.method, "scores")
        if like.method in PREFERENCE_FEEDBACK and _of_both(prepare, source):
            feedback = PAIRS_AND_SCORES
        why = f"linear on {feedback}: took {like.taken_as}: {like.why}"
        return MethodChoice(LINEAR, why, {"feedback": feedback})
    if wanted != "auto":
        return MethodChoice(method_named(wanted).slug, f"{wanted} was asked for")
    chosen = (
        _of_feedback(served, base_model, need, source)
        # ten thumbs and corrections are enough together, though no kind has ten of its own
        or (_of_feedback(served, base_model, FEWEST_ROWS, source) if min_samples is None else None)
        or _of_rewards(prepare("scores"))
        or _of_prompts(prepare("prompts"), need)
    )
    if chosen is None:
        return _taken("dpo", NOTHING_TEACHES)
    teacher = teacher_log(agent) if not source.get("source") else None
    if teacher is None or teacher.answers < MANY_ANSWERS:
        return chosen
    also = f"{teacher.answers:,} unrated answers of {teacher.title} could teach it too: --method {DISTIL}"
    return replace(chosen, why=f"{chosen.why}; {also}")


MANY_ANSWERS = 300
"""Unrated answers of one policy from which `auto` names `distil`."""


def _distil(agent: str, prepare: Callable[[str], PreparedDataset | None], need: int) -> MethodChoice:
    """SFT on one policy's unrated answers, and a preference method after it where ratings suffice for one."""
    teacher = teacher_log(agent)
    if teacher is None:
        raise DatasetRefused(
            f"agent {agent}: no answer of another policy is recorded that nobody rated, so nothing can be distilled; "
            "record what your app's model answers, or take --method auto"
        )
    rules = RowRules(sources=EXAMPLE_SOURCES)
    shown = _prepare(agent, "corrections", need, {"rules": rules})
    rows = list(shown.rows()) if shown else []
    own = sum(row["source"] == ANSWER for row in rows)
    reason = f"distil: {own:,} unrated answers of {teacher.title}"
    if beside := len(rows) - own:
        reason += f" and {beside:,} that people wrote or liked"
    hashes, traffic = {str(row["prompt_hash"]) for row in rows}, newest_prompts(agent)
    share = coverage(recorded_prompts(agent, hashes | set(traffic)), hashes, traffic)
    if share is not None:
        reason += f"; they cover {100 * share:.0f} % of the clusters of the newest {len(traffic):,} prompts"
    pairs, labels = _Pairs.of(prepare("pairs")), _Labels.of(prepare("labels"))
    then = _of_pairs_and_singles(pairs, labels, _DemonstrationCounts())
    if then is None or then.method not in PREFERENCE_FEEDBACK:
        return MethodChoice("sft", reason, {"sources": DISTIL})
    return MethodChoice(then.method, f"{reason}; then {then.method}: {then.why}", {"start_from": DISTIL})


NOTHING_TEACHES = "no method has enough samples yet"


def _taken(method: str, why: str, name: str = "", **knobs: object) -> MethodChoice:
    """A method that `auto` takes, by its own or another name."""
    return MethodChoice(method, why, knobs, name or method)


def _of_feedback(agent: Agent, base_model: str, need: int, source: dict[str, object]) -> MethodChoice | None:
    """The method of what people said and wrote; None where no kind of it has `need` rows."""

    def prepare(kind: str) -> PreparedDataset | None:
        return _prepare(agent.slug, kind, need, source)

    datasets = {slug: prepare(METHODS[slug].kind) for slug in ("dpo", "kto", "sft")}
    pairs, labels, shown = (
        _Pairs.of(datasets["dpo"]),
        _Labels.of(datasets["kto"]),
        _DemonstrationCounts.of(datasets["sft"]),
    )
    chosen = _of_pairs_and_singles(pairs, labels, shown)
    if chosen and chosen.method in PREFERENCE_FEEDBACK and base_model == BUNDLED:
        feedback = PREFERENCE_FEEDBACK[chosen.method]
        rows = datasets["dpo"] if chosen.method == "dpo" else prepare(feedback)
        if both := _of_both(prepare, source):
            feedback, rows = PAIRS_AND_SCORES, both
        chosen = _of_preferred(agent, chosen, feedback, rows) or chosen
    if chosen and chosen.method in PREFERENCE_FEEDBACK and shown.human:
        liked = f" and {shown.liked:,} that were liked" if shown.liked else ""
        why = f"{chosen.why}; SFT on {shown.human:,} responses written by people{liked} comes first"
        chosen = _taken(chosen.method, why, start_from=SFT_STAGE)
    return chosen


LINEAR, REWARD_MODEL = "linear", "reward_model"
LINEAR_FEEDBACK = {"dpo": "pairs", "sft": "corrections"}
"""Method that `auto` takes -> the feedback a linear policy then learns from; else from scores, which thumbs are too."""


def _reward_model(agent: Agent, need: int, source: dict[str, object], base_model: str) -> MethodChoice:
    """A reward model's objective: pairwise where pairs hold a quarter of the judged responses, binary for thumbs,
    regression for scores, stars and rewards; and the better of a linear one and a score head where the base is a
    bundled one. What RATCHET_CONFIG says goes before both."""
    configured = settings.RATCHET_CONFIG.get(REWARD_MODEL, {})
    prepared = {kind: _prepare(agent.slug, kind, need, source) for kind in ("pairs", "scores")}
    objective, reason = _objective(prepared["pairs"], prepared["scores"])
    knobs = {"objective": objective}
    reason = f"objective {objective}: {reason}"
    if "objective" in configured:
        knobs, reason = {}, f"RATCHET_CONFIG asks for the objective {configured['objective']}"
    rows = prepared["pairs"] if objective == "pairwise" else prepared["scores"]
    if "architecture" not in configured and base_model == BUNDLED and _is_read_by_words(agent, rows):
        knobs["architecture"] = AUTO_ARCHITECTURE
        reason += "; a linear one beside the bundled base's, and the better of both on the eval split is kept"
    return MethodChoice(REWARD_MODEL, reason, knobs)


def _is_read_by_words(agent: Agent, rows: PreparedDataset | None) -> bool:
    """True of answers whose worth stands in their values: JSON whose schema names every one, and a choice among few.

    Not of free text, within JSON or not: who is rewarded by a bag of words learns to name words.
    """
    train = list(rows.rows("train")) if rows else []
    if train and all(names_values(agent.schema_served(row.get("state"))) for row in train[:FEW_SEEN]):
        return True
    try:
        prompts_teachable(train, agent)
    except LinearRefused:
        return False
    return True


FEW_SEEN = 20
"""Rows whose schema is looked at."""


def _objective(pairs_made: PreparedDataset | None, scored: PreparedDataset | None) -> tuple[str, str]:
    """The objective of a reward model by its feedback, and why."""
    pairs = _Pairs.of(pairs_made)
    values = [float(row["score"]) for row in scored.rows("train")] if scored else []
    objective, reason = (
        "pairwise",
        f"{pairs.all:,} pairs, with {pairs.responses:,} of {len(values):,} judged responses",
    )
    if pairs.responses < PAIRED_SHARE * len(values) or not pairs.all:
        between = sum(0 < value < 1 for value in values)
        if between > FEW_BETWEEN * len(values):
            objective, reason = (
                "regression",
                f"{len(values):,} scored responses, {between:,} of them between 0 and 1",
            )
        elif values:
            objective, reason = (
                "binary",
                f"{len(values):,} responses with a thumb, {pairs.responses:,} of them in pairs",
            )
    return objective, reason


FEW_BETWEEN = 0.1
"""Share of mean verdicts strictly between 0 and 1 up to which feedback is taken for thumbs, on which raters differ at
times; above it, for scores."""


@dataclass(frozen=True)
class _Pairs:
    """Training pairs: all, those of preferences alone, the responses in the latter, and the prompts of those."""

    all: int = 0
    preferred: int = 0
    responses: int = 0
    prompts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, prepared: PreparedDataset | None) -> _Pairs:
        rows = list(prepared.rows("train")) if prepared else []
        preferred = [row for row in rows if row["source"] not in HUMAN_SOURCES]
        responses = {(row["prompt_hash"], repr(row[side])) for row in preferred for side in SIDES}
        return cls(len(rows), len(preferred), len(responses), _prompts_of(preferred))


SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class _Labels:
    """Training labels, and the prompts of the bad ones."""

    good: int = 0
    bad: int = 0
    bad_prompts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, prepared: PreparedDataset | None) -> _Labels:
        rows = list(prepared.rows("train")) if prepared else []
        bad = [row for row in rows if not row["label"]]
        return cls(len(rows) - len(bad), len(bad), _prompts_of(bad))


@dataclass(frozen=True)
class _DemonstrationCounts:
    """Training demonstrations: those a person wrote or showed, those that were liked, and the prompts of the former."""

    human: int = 0
    liked: int = 0
    human_prompts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, prepared: PreparedDataset | None) -> _DemonstrationCounts:
        rows = list(prepared.rows("train")) if prepared else []
        human = [row for row in rows if row["source"] in HUMAN_SOURCES]
        return cls(len(human), len(rows) - len(human), _prompts_of(human))


def _prompts_of(rows: Iterable[Row]) -> frozenset[str]:
    return frozenset(str(row["prompt_hash"]) for row in rows)


def _of_pairs_and_singles(pairs: _Pairs, labels: _Labels, shown: _DemonstrationCounts) -> MethodChoice | None:
    count = f"{pairs.all:,} pairs to train on"
    response_count = max(labels.good + labels.bad, pairs.responses)
    # what SFT is not shown: preferences and dislikes on prompts nobody wrote a response to
    unheard = len((pairs.prompts | labels.bad_prompts) - shown.human_prompts)
    if shown.human >= max(unheard, 1):
        beside = f", {shown.liked:,} that were liked beside them" if shown.liked else ""
        other = f"; {unheard:,} other prompts have a preference or a dislike" if unheard else ""
        return _taken("sft", f"{shown.human:,} responses written by people{beside}{other}")
    if pairs.all and pairs.responses >= PAIRED_SHARE * response_count:
        beside = (
            f", with {pairs.responses:,} of {response_count:,} judged responses in them"
            if response_count
            else ""
        )
        return _taken("dpo", f"{count}{beside}")
    if min(labels.good, labels.bad) >= FEWEST_OF_A_KIND:
        few = f"only {pairs.responses:,} of them in pairs" if pairs.preferred else "not enough pairs"
        return _taken("kto", f"{labels.good:,} good and {labels.bad:,} bad responses, {few}")
    if pairs.all:
        return _taken("dpo", f"{count}, and hardly any thumbs besides")
    if total := shown.human + shown.liked:
        what = f"{total:,} corrections, demonstrations and liked responses"
        return _taken("sft", f"{what}, and not enough other feedback")
    return None


PREFERENCE_FEEDBACK = {"dpo": "pairs", "kto": "scores"}
"""Method that learns from preferences or dislikes -> the kind of dataset with the same feedback."""

FEWEST_PROMPTS = {CLOSED: 60, LISTED: 150, FIELDS: 60}
"""Prompts below which a linear policy finds too little of a rule. From 65 with one verdict each it gave 53 to 81 %
liked answers in three made-up worlds (docs/decisions/29)."""

FEWEST_BESIDE = 20
"""Prompts below which no linear policy is trained beside a real base model."""

PAIRS_AND_SCORES = "pairs_and_scores"
"""Feedback of pairs and of single answers together, which a classifier hears at once."""


def _of_both(
    prepare: Callable[[str], PreparedDataset | None], source: dict[str, object]
) -> PreparedDataset | None:
    """The pairs with the scores of answers that stand in none; None for files, and where one of both is missing."""
    if source.get("source") is not None:
        return None
    found = prepare(PAIRS_AND_SCORES)
    kinds = {"chosen" in row for row in found.rows("train")} if found else set()
    return found if len(kinds) == 2 else None


def _of_preferred(
    agent: Agent, like: MethodChoice, feedback: str, rows: PreparedDataset | None
) -> MethodChoice | None:
    """SFT on the answers that were preferred or liked; None for wordings, for a choice, for too few of them, and for
    thumbs on a built-in agent, whose answers the base can write already: KTO hears what was disliked, too."""
    if rows is None or not agent.structured or (agent.slug in AGENTS and like.method == "kto"):
        return None
    train = list(rows.rows("train"))
    try:
        prompts_teachable(train, agent)
    except LinearRefused:
        preferred = len(preferred_rows(train))
    else:
        return None  # a choice among few, of too few prompts for a classifier
    if preferred < FEWEST_PREFERRED:
        return None
    why = (
        f"{like.why}; answers are JSON of several values, which the bundled base learns to write from examples: "
        f"{preferred:,} answers that people preferred or liked are the demonstrations"
    )
    return _taken("sft", why, feedback=feedback, teacher=PREFERRED)


FEWEST_PREFERRED = 30
"""Prompts with a preferred or liked answer below which the bundled base is not shown these alone."""


def _of_rewards(scores: PreparedDataset | None) -> MethodChoice | None:
    if scores is not None and len({row["score"] for row in scores.rows("train")}) > 1:
        count = f"{scores.counts['train']:,} scored responses, but neither pairs nor both good and bad ones"
        return _taken("ppo", count, RLHF, reward=AUTO)
    return None


def _of_prompts(prompts: PreparedDataset | None, need: int) -> MethodChoice | None:
    """GRPO where nobody said anything, and what is known of the prompts decides whether an answer is right."""
    known = [row.get("facts") or {} for row in prompts.rows("train")] if prompts else []
    right = sum(any(facts.get(name) not in EMPTY for name in ANSWER_COLUMNS) for facts in known)
    with_tests = sum(
        any(facts.get(name) not in EMPTY for name in (*TESTS, *EXPECTED_OUTPUTS)) for facts in known
    )
    if max(right, with_tests) < need:
        return None
    if right >= with_tests:
        return _taken("grpo", f"{right:,} prompts with a known right answer", reward="answer")
    if settings.ENABLE_CODE_EXECUTION:
        return _taken("grpo", f"{with_tests:,} prompts with tests", reward="code_execution")
    off = f"{with_tests:,} prompts with tests are for grpo, with ENABLE_CODE_EXECUTION=true (docs/reward-reference.md)"
    return _taken("dpo", f"there are no ratings; {off}")


EMPTY: tuple[object, ...] = (None, "", [], {})


def _prepare(agent: str, kind: str, need: int, source: dict[str, Any]) -> PreparedDataset | None:
    """The dataset of a kind, only counted; None where it is too small."""
    try:
        return prepare_training_dataset(agent, kind=kind, min_samples=need, dry_run=True, **source)
    except DatasetRefused:
        return None
