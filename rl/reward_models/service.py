"""Registry of reward models: register, judge on held-out feedback, promote the better one, find the one to use.

A reward model is judged by the share of held-out feedback it ranks as people did. Torch is imported only inside
functions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import IntegrityError, transaction

from backend.installation import PROGRAM
from feedback.selectors import feedback_counts
from rl.checksums import FileDamaged, file_check, file_sum
from rl.datasets import DatasetRefused, prepare_training_dataset, snapshot_rows
from rl.models import LabelRun, RewardModelEvent, RewardModelVersion, Snapshot, TrainingRun
from rl.models.runs import RunRefused, run_folder
from rl.recipes.methods import OBJECTIVE_KINDS
from rl.recipes.reward_model import FACTS
from rl.registry import service as registry
from rl.registry.integrity import damage_notify, weights_name
from rl.registry.service import home_path, home_relative
from rl.rewards.catalogue import LEARNED_REWARD, rewards_named
from rl.statistics import concordance, concordance_difference, paired_difference, wilson_interval

if TYPE_CHECKING:
    from rl.training.hardware import Hardware
    from rl.training.result import TrainResult

Stage = RewardModelVersion.Stage
Kind = RewardModelEvent.Kind

COIN = 0.5
"""Share of held-out feedback ranked right by chance."""

STALE_AFTER = 1.2
"""A reward model is retrained once the agent has this many times the feedback it was trained on."""


class RewardModelRefused(ValueError):
    """A reward model that does not exist, cannot move or cannot be used; the message says what to do."""


@dataclass(frozen=True)
class _HeldOutRanking:
    """A ranking of held-out rows, and its difference to another model's on the same rows."""

    share: dict[str, Any]
    difference: dict[str, float] | None = None


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


def reward_model_champion(agent: str) -> RewardModelVersion | None:
    return RewardModelVersion.objects.filter(agent=agent, stage=Stage.CHAMPION).first()


def reward_model_valid(agent: str, base_model: str) -> RewardModelVersion | None:
    """The agent's champion if it can be used as it is, else None.

    Its files must be intact, its base model the one that would be used now for a policy on `base_model`, and the
    feedback must not have outgrown it.
    """
    champion = reward_model_champion(agent)
    if champion is None or fault_of(champion):
        return None
    fresh = feedback_counts(agent).feedback <= STALE_AFTER * champion.feedback_count
    same = champion.base_model == reward_base_model(base_model)
    return champion if fresh and same and ranks_above_chance(champion.ranking) else None


def reward_base_model(policy: str) -> str:
    """The base of a reward model: the one in RATCHET_CONFIG, else the policy's, which it then shares."""
    return str(settings.RATCHET_BASE_MODELS.get("reward_model") or policy)


def fault_of(version: RewardModelVersion) -> str:
    """Fault of its files; empty if they are those that were registered."""
    weights = home_path(version.path) / weights_name(version.architecture)
    if not weights.is_file():
        return f"{version.name}: there is no {weights}; train it again"
    try:
        file_check(weights, version.sha256, "train it again, or restore it from a backup")
    except FileDamaged as damage:
        damage_notify(damage, f"reward model {version.name}")
        return (
            f"{version.name}: {weights} is not the file that was registered (its SHA-256 differs): {damage}"
        )
    return ""


def reward_model_folder(version: RewardModelVersion) -> Path:
    """Its folder, verified. Raises RewardModelRefused."""
    if fault := fault_of(version):
        raise RewardModelRefused(fault)
    return home_path(version.path)


# --- Registering and evaluating one --------------------------------------------------------------------------


def reward_model_register(
    run: TrainingRun, result: TrainResult, *, actor: str, finish: Callable[[str], None]
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
    shutil.rmtree(home, ignore_errors=True)
    half.rename(home)
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
        _event(version, Kind.REGISTERED, actor, f"trained by run {run.pk}", to_stage=version.stage)
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
    version: RewardModelVersion, *, actor: str, hardware: Hardware | None = None
) -> RewardModelVersion:
    """Ranks the holdout with it and the champion; promotes it if it beats chance and the champion.

    The figures and the reason are recorded either way.
    """
    rows, snapshot = _held_out(version)
    champion = reward_model_champion(version.agent)
    rival = (
        champion if champion is not None and champion.pk != version.pk and not fault_of(champion) else None
    )
    own = _scores(version, rows, hardware)
    other = _scores(rival, rows, hardware) if rival else None
    ranked = ranking_of(rows, own, other)
    facts = {**ranked.share, "snapshot": snapshot.pk if snapshot else None}
    if rival is not None and other is not None:
        facts |= {"against": rival.name, "difference": ranked.difference}
        _ranking_note(rival, {**ranking_of(rows, other).share, "snapshot": facts["snapshot"]}, actor)
    _ranking_note(version, facts, actor)
    if version.stage == Stage.CANDIDATE:
        try:
            reward_model_promote(version, actor=actor)
        except RewardModelRefused as refusal:
            _event(version, Kind.REFUSED, actor, str(refusal), figures=facts)
    version.refresh_from_db()
    return version


def _held_out(version: RewardModelVersion) -> tuple[list[dict[str, Any]], Snapshot | None]:
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
        firsts: dict[str, dict[str, Any]] = {}
        for row in rows:
            firsts.setdefault(row["prompt_hash"], row)
        rows = list(firsts.values())
    return rows, snapshot


def _scores(
    version: RewardModelVersion, rows: list[dict[str, Any]], hardware: Hardware | None
) -> list[list[float]]:
    from rl.training.reward_scores import RewardModel

    return RewardModel.load(reward_model_folder(version), hardware).row_scores(rows) if rows else []


def ranking_of(
    rows: Sequence[dict[str, Any]],
    own: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]] | None = None,
) -> _HeldOutRanking:
    """The share of held-out feedback ranked as people did, and its difference to another model's.

    Pairs: the chosen response scores higher (Wilson, Newcombe). Single responses: concordance.
    """
    if rows and "chosen" in rows[0]:
        right = [chosen > rejected for chosen, rejected in own]
        share = {**wilson_interval(sum(right), len(right)).as_dict(), "what": "pairs", "compared": len(right)}
        if other is None:
            return _HeldOutRanking(share)
        both = list(zip(right, [chosen > rejected for chosen, rejected in other], strict=True))
        counts = [both.count(case) for case in ((True, True), (True, False), (False, True), (False, False))]
        return _HeldOutRanking(share, paired_difference(*counts).as_dict())
    what = "labels" if rows and "label" in rows[0] else "scores"
    values = [float(row["label"] if what == "labels" else row["score"]) for row in rows]
    prompts = [str(row["prompt_hash"]) for row in rows]
    scores = [score for (score,) in own]
    found = concordance(values, scores, prompts)
    share = {**found.share.as_dict(), "n": len(rows), "what": what, "compared": found.pair_count}
    if other is None:
        return _HeldOutRanking(share)
    difference = concordance_difference(values, scores, [score for (score,) in other], prompts)
    return _HeldOutRanking(share, difference.as_dict() if difference else None)


def ranks_above_chance(ranking: dict[str, Any]) -> bool:
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


def difference_text(difference: dict[str, float]) -> str:
    value, low, high = (100 * difference[name] for name in ("value", "low", "high"))
    return f"{value:+.0f} points ({low:+.0f} to {high:+.0f})"


# --- Moving one ---------------------------------------------------------------------------------------------


def gate_fault(version: RewardModelVersion) -> str:
    """Why it may not become champion; empty if it may."""
    ranking = version.ranking
    if not ranking:
        return f"it was not evaluated: {PROGRAM} reward_model judge {version.name}"
    if not ranks_above_chance(ranking):
        return (
            f"it is no better than chance: it {ranking_text(ranking)}, and the interval holds 50 %; rate more at "
            f"/rate/?agent={version.agent} and train it again"
        )
    champion = reward_model_champion(version.agent)
    if (
        champion is None
        or champion.pk == version.pk
        or fault_of(champion)
        or not ranks_above_chance(champion.ranking)
    ):
        return ""
    if ranking.get("against") != champion.name:
        return f"it was not compared with the champion {champion.name}: {PROGRAM} reward_model judge {version.name}"
    difference = ranking.get("difference")
    if not difference or difference["low"] <= 0:
        found = difference_text(difference) if difference else "nothing to compare"
        return f"it is not shown to rank better than {champion.name} on the same {ranking['n']} rows: {found}"
    return ""


def reward_model_promote(
    version: RewardModelVersion, *, actor: str, reason: str = "", force: bool = False
) -> RewardModelVersion:
    """Makes it the agent's reward model and retires the previous one in the same transaction.

    `force` with a reason overrides the gate, on record. Raises RewardModelRefused.
    """
    if force and not reason.strip():
        raise RewardModelRefused("a promotion by force needs a reason, which is kept on record; found none")
    fault = fault_of(version) or gate_fault(version)
    if fault and (not force or fault_of(version)):
        raise RewardModelRefused(f"{version.name} stays {version.stage}: {fault}")
    return _move(
        version, Stage.CHAMPION, Kind.PROMOTED, actor, reason or ranking_text(version.ranking), forced=force
    )


def reward_model_retire(version: RewardModelVersion, *, actor: str, reason: str = "") -> RewardModelVersion:
    """Takes it out of use; its row, files and history stay. Raises RewardModelRefused."""
    return _move(version, Stage.RETIRED, Kind.RETIRED, actor, reason)


def reward_model_move(
    version: RewardModelVersion, move: str, *, actor: str, reason: str = "", force: bool = False
) -> RewardModelVersion:
    """The move of a button: `champion` or `retired`. Raises RewardModelRefused."""
    if move == Stage.CHAMPION:
        return reward_model_promote(version, actor=actor, reason=reason, force=force)
    if move == Stage.RETIRED:
        return reward_model_retire(version, actor=actor, reason=reason)
    raise RewardModelRefused(f"expected champion or retired, found {move!r}")


MOVES: dict[str, tuple[str, ...]] = {
    Stage.CANDIDATE: (Stage.CHAMPION, Stage.RETIRED),
    Stage.CHAMPION: (Stage.RETIRED,),
    Stage.RETIRED: (Stage.CHAMPION,),
    Stage.REJECTED: (),
}


def _move(
    version: RewardModelVersion, to: str, kind: str, actor: str, reason: str, *, forced: bool = False
) -> RewardModelVersion:
    try:
        with transaction.atomic():
            current = RewardModelVersion.objects.select_for_update().get(pk=version.pk)
            if to not in MOVES[current.stage]:
                raise RewardModelRefused(f"{current.name} is {current.stage} and cannot become {to}")
            if to == Stage.CHAMPION:
                champions = RewardModelVersion.objects.select_for_update().filter(
                    agent=current.agent, stage=Stage.CHAMPION
                )
                for before in champions:
                    RewardModelVersion.objects.filter(pk=before.pk).update(stage=Stage.RETIRED)
                    why = f"replaced by {current.name}"
                    _event(before, Kind.RETIRED, actor, why, from_stage=before.stage, to_stage=Stage.RETIRED)
            RewardModelVersion.objects.filter(pk=current.pk).update(stage=to)
            _event(
                current,
                kind,
                actor,
                reason,
                from_stage=current.stage,
                to_stage=to,
                forced=forced,
                figures=current.ranking,
            )
    except IntegrityError as error:
        raise RewardModelRefused(
            f"another reward model of {version.agent} was promoted at the same time; reload and try again"
        ) from error
    version.refresh_from_db()
    return version


def _ranking_note(version: RewardModelVersion, ranking: dict[str, Any], actor: str) -> None:
    RewardModelVersion.objects.filter(pk=version.pk).update(ranking=ranking)
    version.ranking = ranking
    _event(version, Kind.EVALUATED, actor, ranking_text(ranking), figures=ranking)


def _event(version: RewardModelVersion, kind: str, actor: str, reason: str, **facts: Any) -> None:
    RewardModelEvent.objects.create(reward_model=version, kind=kind, actor=actor, reason=reason, **facts)


# --- Reward specs of an order (`--reward`) for the training package ---


def rewards_located(specs: str, agent: str) -> str:
    """Reward specs with folders: `model:RUN` and `model:NAME` become `model:FOLDER`, `learned` becomes `learned:FOLDER`
    (the agent's newest label model). `auto` stays until the run has a reward model.

    Raises RunRefused for an unknown run, a run without a reward model, and without a label model; RewardRefused for an
    unknown name.
    """
    from rl.training.result import ResultError, TrainResult

    names = []
    for spec in specs.split(","):
        kind, _, name = spec.strip().partition(":")
        if kind == "code_execution" and not settings.ENABLE_CODE_EXECUTION:
            raise RunRefused(
                "--reward code_execution runs code that a model wrote and is off: set ENABLE_CODE_EXECUTION=true "
                "to turn it on (docs/rewards.md)"
            )
        if spec.strip() == LEARNED_REWARD:
            labels = LabelRun.objects.filter(agent=agent).exclude(path="").order_by("-pk").first()
            if labels is None:
                raise RunRefused(
                    f"--reward learned: no reward was learned from ratings of {agent} yet; run "
                    f"`{PROGRAM} auto_label --agent {agent}` first"
                )
            spec = f"{LEARNED_REWARD}:{registry.home_path(labels.path)}"
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
