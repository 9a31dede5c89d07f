"""Registry of reward models: register, judge on held-out feedback, find the one to use.

A reward model is judged by the share of held-out feedback it ranks as people did. Torch is imported only inside
functions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import transaction

from backend.database import connection_release
from backend.installation import PROGRAM
from feedback.selectors import feedback_counts
from rl import artifacts
from rl.checksums import FileDamaged, file_check, file_sum, sums_check, sums_write
from rl.datasets import DatasetRefused, prepare_training_dataset, snapshot_rows
from rl.models import RewardModelVersion, Snapshot, TrainingRun
from rl.models.fine_tuning import GRADERS
from rl.models.runs import RunRefused, run_folder
from rl.recipes.methods import OBJECTIVE_KINDS
from rl.recipes.reward_model import FACTS
from rl.registry.integrity import damage_notify, weights_name
from rl.registry.service import home_path, home_relative
from rl.rewards.catalogue import LEARNED_REWARD, rewards_named
from rl.rewards.graders import PREFIX, GraderError, Sampling
from rl.serving import fallback
from rl.serving.assembly import answer_of
from rl.serving.base import Ask, ServingRefused
from rl.serving.decision_facts import cost_usd
from rl.serving.routing import cost_keep, target_of
from rl.statistics import concordance, wilson_interval

if TYPE_CHECKING:
    from rl.training.hardware import Hardware
    from rl.training.result import TrainResult

COIN = 0.5
"""Share of held-out feedback ranked right by chance."""

STALE_AFTER = 1.2
"""A reward model is retrained once the agent has this many times the feedback it was trained on."""


class RewardModelRefused(ValueError):
    """A reward model that does not exist or cannot be used; the message says what to do."""


# --- Finding one --------------------------------------------------------------------------------------------


def reward_model_get(name: str) -> RewardModelVersion:
    """The reward model of a name. Raises RewardModelRefused, naming existing ones."""
    found = RewardModelVersion.objects.filter(name=name).first()
    if found is None:
        names = list(RewardModelVersion.objects.order_by("-pk").values_list("name", flat=True)[:5])
        there = (
            f"there are {', '.join(names)}"
            if names
            else f"train one: {PROGRAM} train_reward_model --agent SLUG"
        )
        raise RewardModelRefused(f"no reward model is named {name!r}; {there}")
    return found


def reward_model_best(agent: str) -> RewardModelVersion | None:
    """The agent's newest reward model that ranks held-out feedback better than chance."""
    rows = RewardModelVersion.objects.filter(agent=agent)
    return next((row for row in rows if ranks_above_chance(row.ranking)), None)


def reward_model_valid(agent: str, base_model: str) -> RewardModelVersion | None:
    """The agent's best reward model if it can be used as it is, else None.

    Its files must be intact, its base model the one that would be used now for a policy on `base_model`, and the
    feedback must not have outgrown it.
    """
    found = reward_model_best(agent)
    if found is None or fault_of(found):
        return None
    fresh = feedback_counts(agent).feedback <= STALE_AFTER * found.feedback_count
    return found if fresh and found.base_model == reward_base_model(base_model) else None


def reward_base_model(policy: str) -> str:
    """The base of a reward model: the one in RATCHET_CONFIG, else the policy's, which it then shares."""
    return str(settings.RATCHET_BASE_MODELS.get("reward_model") or policy)


def fault_of(version: RewardModelVersion) -> str:
    """Fault of its files; empty if they are those that were registered."""
    try:
        artifacts.fetch(version.path)
    except artifacts.StoreFailed as failure:
        return f"{version.name}: {failure}"
    weights = home_path(version.path) / weights_name(version.architecture)
    if not weights.is_file():
        return f"{version.name}: there is no {weights}; train it again"
    remedy = "train it again, or restore it from a backup"
    try:
        file_check(weights, version.sha256, remedy)
        sums_check(weights.parent, remedy)
    except FileDamaged as damage:
        damage_notify(damage, f"reward model {version.name}")
        return f"{version.name}: {damage.path} is not the file that was registered (its SHA-256 differs): {damage}"
    return ""


def reward_model_folder(version: RewardModelVersion) -> Path:
    """Its folder, verified. Raises RewardModelRefused."""
    if fault := fault_of(version):
        raise RewardModelRefused(fault)
    return home_path(version.path)


# --- Registering and evaluating one --------------------------------------------------------------------------


def reward_model_register(
    run: TrainingRun, result: TrainResult, *, finish: Callable[[str], None]
) -> RewardModelVersion:
    """Copies a finished reward model to its place, registers it and ends its run in one transaction.

    finish: ends the run, given the reason why training stopped early, or "".
    """
    snapshot = run.snapshot
    assert snapshot is not None  # a run without a dataset trains nothing
    name = _name_next(run.agent, snapshot.feedback_count)
    home = settings.RATCHET_HOME / "reward_models" / run.agent / name
    half = home.with_name(f".{home.name}.{run.pk}")
    shutil.rmtree(half, ignore_errors=True)
    half.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(result.checkpoint, half)
    sums_write(half)
    shutil.rmtree(home, ignore_errors=True)
    half.rename(home)
    artifacts.put(home)
    architecture = str(
        json.loads((home / FACTS).read_text("utf-8"))["architecture"]
    )  # of `auto`, the one kept
    with transaction.atomic():
        version = RewardModelVersion.objects.create(
            name=name,
            agent=run.agent,
            run=run,
            base_model=run.base_model,
            base_model_hash=run.base_model_hash,
            path=home_relative(home),
            sha256=file_sum(home / weights_name(architecture)),
            objective=run.recipe["objective"],
            architecture=architecture,
            feedback_count=snapshot.feedback_count,
        )
        reason = f"stopped early: {result.stopped_early}" if result.stopped_early else ""
        finish(reason)
    return version


def _name_next(agent: str, feedback_count: int) -> str:
    """`<agent>-rm-v<feedback count>`, with .2, .3, ... if taken."""
    name = f"{agent}-rm-v{feedback_count}"
    taken = set(RewardModelVersion.objects.filter(name__startswith=name).values_list("name", flat=True))
    return next(
        candidate
        for number in range(1, len(taken) + 2)
        if (candidate := name if number == 1 else f"{name}.{number}") not in taken
    )


def reward_model_judge(
    version: RewardModelVersion, *, hardware: Hardware | None = None
) -> RewardModelVersion:
    """Ranks the holdout with it, and stores the figures."""
    rows, snapshot = _held_out(version)
    ranking = ranking_of(rows, _scores(version, rows, hardware))
    version.ranking = {**ranking, "snapshot": snapshot.pk if snapshot else None}
    version.save(update_fields=["ranking"])
    return version


def _held_out(version: RewardModelVersion) -> tuple[list[dict[str, object]], Snapshot | None]:
    """Rows nobody trained on: the present holdout, or that of the file it was trained from."""
    snapshot = version.run.snapshot if version.run else None
    if snapshot is None or snapshot.query.get("source") != "file":
        try:
            snapshot = prepare_training_dataset(
                version.agent, kind=OBJECTIVE_KINDS[version.objective], for_training=False
            ).snapshot
        except DatasetRefused:
            return [], None
    if snapshot is None:
        return [], None
    rows = list(snapshot_rows(snapshot, "holdout"))
    if rows and "chosen" in rows[0]:
        # the strongest pair of each prompt: intervals that count rows would count its other pairs as independent
        firsts: dict[str, dict[str, object]] = {}
        for row in rows:
            firsts.setdefault(row["prompt_hash"], row)
        rows = list(firsts.values())
    return rows, snapshot


def _scores(
    version: RewardModelVersion, rows: list[dict[str, object]], hardware: Hardware | None
) -> list[list[float]]:
    from rl.training.reward_scores import RewardModel

    return RewardModel.load(reward_model_folder(version), hardware).row_scores(rows) if rows else []


def ranking_of(rows: Sequence[Mapping[str, Any]], own: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The share of held-out feedback ranked as people did, with its 95 % interval.

    Pairs: the chosen response scores higher (Wilson). Single responses: concordance.
    """
    if rows and "chosen" in rows[0]:
        right = [chosen > rejected for chosen, rejected in own]
        return {**wilson_interval(sum(right), len(right)).as_dict(), "what": "pairs", "compared": len(right)}
    what = "labels" if rows and "label" in rows[0] else "scores"
    values = [float(row["label"] if what == "labels" else row["score"]) for row in rows]
    found = concordance(values, [score for (score,) in own], [str(row["prompt_hash"]) for row in rows])
    return {**found.share.as_dict(), "n": len(rows), "what": what, "compared": found.pair_count}


def ranks_above_chance(ranking: Mapping[str, object]) -> bool:
    """True if the 95 % interval of the share lies above 1/2."""
    low = ranking.get("low")
    return isinstance(low, float) and low > COIN


WORDS = {"pairs": "held-out pairs", "labels": "held-out thumbs", "scores": "held-out scores"}


def ranking_text(ranking: dict[str, Any]) -> str:
    what = WORDS.get(str(ranking.get("what")), "held-out ratings")
    if not isinstance(ranking.get("value"), float):
        return f"nothing could be ranked: {ranking.get('n', 0)} {what}"
    share = f"{100 * ranking['value']:.0f} % ({100 * ranking['low']:.0f} to {100 * ranking['high']:.0f})"
    return f"ranks {share} of {ranking['n']} {what} as people did"


# --- Reward specs of an order (`--reward`) for the training package ---


def rewards_located(specs: str, agent: str) -> str:
    """Reward specs with folders: `model:RUN` and `model:NAME` become `model:FOLDER`, `learned` becomes that of the
    agent's best reward model, `grader:NAME` becomes `grader:FILE`. `auto` stays until the run has a reward model.

    Raises RunRefused for an unknown run, a run without a reward model, and an agent without one; RewardRefused for an
    unknown name.
    """
    from rl.training.result import ResultError, TrainResult

    names = []
    for spec in specs.split(","):
        kind, _, name = spec.strip().partition(":")
        if kind == "code_execution" and not settings.ENABLE_CODE_EXECUTION:
            raise RunRefused(
                "--reward code_execution runs code that a model wrote and is off: set ENABLE_CODE_EXECUTION=true "
                "to turn it on (docs/reward-reference.md)"
            )
        if spec.strip().startswith(PREFIX):
            spec = f"{PREFIX}{settings.RATCHET_HOME / GRADERS / Path(name).name}"
        if spec.strip() == LEARNED_REWARD:
            spec = f"model:{reward_model_folder(_reward_model_learned(agent))}"
        if kind == "model" and not name.isdigit() and not Path(name).exists():
            spec = f"model:{reward_model_folder(reward_model_get(name))}"
        if kind == "model" and name.isdigit():
            run = TrainingRun.objects.filter(pk=int(name), method="reward_model").first()
            if run is None:
                raise RunRefused(
                    f"--reward {spec}: run {name} trained no reward model; see `{PROGRAM} train_reward_model`"
                )
            registered = RewardModelVersion.objects.filter(run=run).first()
            try:
                spec = "model:" + (
                    str(reward_model_folder(registered))
                    if registered
                    else TrainResult.load(run_folder(run) / "result.json").checkpoint
                )
            except ResultError as error:
                raise RunRefused(
                    f"--reward {spec}: run {name} is {run.status} and left no model ({error})"
                ) from error
        names.append(spec.strip())
    rewards_named(names, code_execution=settings.ENABLE_CODE_EXECUTION)
    return ",".join(names)


SCORE: Mapping[str, object] = {
    "type": "object",
    "properties": {"result": {"type": "number"}},
    "required": ["result"],
    "additionalProperties": False,
}
"""Form of a score model's answer."""


def score_model_ask(model: str, messages: Sequence[Mapping[str, str]], sampling: Sampling) -> str:
    """What an agent or policy of this server says to a grader's messages; only its cost is kept. Raises GraderError."""
    try:
        target = target_of(model)
        asked = Ask(
            messages,
            sampling.max_completions_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            response_schema=SCORE,
            extra={"reasoning_effort": sampling.reasoning_effort} if sampling.reasoning_effort else {},
        )
        served = fallback.pieces(target, asked)
        answer = answer_of(list(served.result), served.latency_ms)
        cost_keep(target.agent, cost_usd(answer, served.model))
        return answer.text
    except (ServingRefused, fallback.NobodyAnswers) as failure:
        raise GraderError(f"its model {model} does not answer: {failure}"[:300]) from failure
    finally:
        connection_release()  # of a thread that ends soon


def _reward_model_learned(agent: str) -> RewardModelVersion:
    found = reward_model_best(agent)
    if found is None:
        raise RunRefused(
            f"--reward learned: {agent} has no reward model that ranks held-out feedback better than chance; run "
            f"`{PROGRAM} train_reward_model --agent {agent}` first, or name the reward auto"
        )
    return found


def reward_model_of(run: TrainingRun) -> RewardModelVersion | None:
    """The registered reward model a run learnt from, the first of several; None without one."""
    for spec in str(run.recipe.get("reward", "")).split(","):
        kind, _, name = spec.strip().partition(":")
        if kind == "model":
            known = RewardModelVersion.objects.filter(run_id=int(name)) if name.isdigit() else None
            found = (known or RewardModelVersion.objects.filter(name=name)).first()
            if found is not None:
                return found
    return None
