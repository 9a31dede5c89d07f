"""The readers behind the pages of rl: how each agent stands, its runs, its policies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from django.conf import settings
from django.db.models import Max, Prefetch, Q, QuerySet
from django.utils import timezone

from feedback.models import AgentSettings
from feedback.selectors import SLUG_PATTERN, FeedbackCounts, feedback_counts, feedback_counts_cached
from rl.agents import AGENTS, agent_facts
from rl.agents.base import Agent, AgentFacts
from rl.charts.intervals import Descent, Lineage, Versions, lineage_of, versions_of
from rl.datasets.buffer import buffer_sizes_cached, fresh_sizes_cached
from rl.datasets.gate_distance import MAX_COUNT, GateDistance, gate_distances_cached
from rl.gates.evidence_kinds import LABELS, OUTCOMES, TESTS
from rl.gates.headlines import TITLES, Headline, Share, headline_of, is_number, share_of
from rl.gates.verdict import Verdict
from rl.models import (
    AgentDefinition,
    Artifact,
    Evaluation,
    Experiment,
    LearnerSettings,
    Policy,
    PolicyEvent,
    TrainingRun,
)
from rl.models.agent_definitions import agent_served
from rl.models.learning import learner_defaults
from rl.models.runs import LEARNER, TRAINING
from rl.registry.checklist import policy_verdict
from rl.registry.incumbents import incumbents_sync

EVENTS_SHOWN = 100
"""Newest events and evaluations shown of one policy."""


@dataclass(frozen=True)
class Work:
    """What a run in the background does now."""

    run: TrainingRun
    words: str
    eta_s: float | None
    """Seconds it still needs, or takes if it waits; None where nothing can be said."""
    stalled: str = ""
    """Such as `no step for 12 min`; empty while the run goes on."""

    @property
    def left(self) -> str:
        """Such as `about 25 s to go`, for a run that waits `takes about 25 s`; how long a run stands still. Empty if
        unknown."""
        if self.stalled or self.eta_s is None:
            return self.stalled
        waits = self.run.status == TrainingRun.Status.QUEUED
        return f"takes {about_text(self.eta_s)}" if waits else f"{about_text(self.eta_s)} to go"


def about_text(seconds: float) -> str:
    """A rough duration: `about 25 s`, `about 4 min`."""
    if seconds < 90:
        return f"about {5 * max(1, round(seconds / 5))} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60} min"


@dataclass(frozen=True)
class AgentCard:
    """Summary of one agent: feedback, training, policies, serving."""

    facts: AgentFacts
    counts: FeedbackCounts
    policy: Policy | None
    """The champion, or the newest policy where there is none; of policies that were trained here."""
    run: TrainingRun | None
    """The one at work, or the newest."""
    newest: Policy | None = None
    """The policy trained last."""
    incumbent: Policy | None = None
    """The champion where it was not trained here: the app's own model."""
    buffer: int = 0
    """Ratings, comparisons, outcomes and traces that no policy learnt from yet."""
    fresh: int = 0
    """Of these, those that count for the online learner."""
    retrain_threshold: int = 0
    """Number that starts a retrain."""
    charts: Sequence[Versions] = ()
    """Accuracy and reward over the newest versions."""
    learner: str = ""
    """State of the online learner, in words."""
    learns_by_itself: bool = False
    """True if the online learner trains it when enough is new."""
    experiments: Sequence[Experiment] = ()
    """Running experiments."""
    distance: GateDistance | None = None
    """Distance of its held-out evidence from what the gate asks for; None without feedback, or with very
    much."""
    stopped_beside: TrainingRun | None = None
    """A newer run that somebody tried beside a policy that stands, and that stopped: no fault of the agent's."""
    gate_refusal: str = ""
    """Reason why the gate stayed closed when it was last asked about the newest policy; empty where it opened
    or was not asked."""

    @property
    def works(self) -> bool:
        """True if its run is at work, or waits for it."""
        return self.run is not None and self.run.is_unfinished

    @property
    def evidence(self) -> list[tuple[str, int]]:
        """Evidence to learn from, by name, of which there is any: ratings before measurements."""
        counts = self.counts
        named = (
            ("ratings and comparisons" if counts.comparisons else "ratings", counts.feedback),
            ("outcomes", counts.outcomes),
            ("demonstrations", counts.demonstrations),
            ("traces", counts.traces),
        )
        return [(name, count) for name, count in named if count]

    @property
    def noun(self) -> str:
        """Name of the evidence it learns from so far, for asking for more."""
        return "ratings" if self.counts.feedback or not self.evidence else self.evidence[0][0]

    @cached_property
    def verdict(self) -> Verdict | None:
        """Verdict on its policy; None where there is none, or none was ever evaluated."""
        return policy_verdict(self.policy) if self.policy and self.policy.metrics else None

    @cached_property
    def newer(self) -> Verdict | None:
        """Verdict on the newest policy where it waits beside the champion; None without one."""
        waits = self.newest and self.newest != self.policy and self.newest.stage == Policy.Stage.CANDIDATE
        return policy_verdict(self.newest) if self.newest and waits and self.newest.metrics else None

    @property
    def headline(self) -> Headline | None:
        """The figure that leads its policy's newest evaluation."""
        return headline_of(self.policy.metrics) if self.policy else None


TRAINED = (Policy.Kind.ADAPTER, Policy.Kind.LINEAR)
"""Kinds of policies that are trained here."""

STOPPED_STATUSES = (TrainingRun.Status.FAILED, TrainingRun.Status.REFUSED, TrainingRun.Status.CANCELLED)

NO_FEEDBACK = FeedbackCounts()


def agent_cards(fresh: str = "") -> list[AgentCard]:
    """A card for every agent that was connected, decided anything or was trained, by its slug.

    fresh: an agent whose feedback is counted now, if it has few decisions; other counts may be a moment old."""
    counts = feedback_counts_cached()
    incumbents_sync(counts)
    if fresh and counts.get(fresh, NO_FEEDBACK).decisions <= MAX_COUNT:
        newest = feedback_counts(fresh)
        counts = {**counts, fresh: newest} if newest.decisions else counts
    newest_runs = TrainingRun.objects.filter(
        pk__in=TrainingRun.objects.filter(stage_of=None)
        .order_by()
        .values("agent")
        .annotate(newest=Max("pk"))
        .values("newest")
    )
    runs = {run.agent: run for run in newest_runs}
    for run in TrainingRun.objects.filter(status=TrainingRun.Status.RUNNING).order_by("-pk"):
        runs[run.agent] = run
    slugs = {*counts, *runs, *AgentSettings.objects.values_list("agent", flat=True)}
    beside = _stopped_beside(runs)
    by_agent: dict[str, list[Policy]] = {}
    for policy in Policy.objects.filter(kind__in=TRAINED).defer("adapter_path").order_by("pk"):
        by_agent.setdefault(policy.agent, []).append(policy)
    newest_policies = _newest_kept(by_agent)
    champions = list(Policy.objects.filter(stage=Policy.Stage.CHAMPION))
    policies = newest_policies | {policy.agent: policy for policy in champions if policy.has_files}
    incumbents = {policy.agent: policy for policy in champions if not policy.has_files}
    slugs |= set(incumbents)
    gated = PolicyEvent.objects.filter(
        policy__in=newest_policies.values(), kind=PolicyEvent.Kind.GATED
    ).order_by("pk")
    gate_refusals = dict(gated.values_list("policy__agent", "reason"))
    waiting, fresh_sizes = buffer_sizes_cached(), fresh_sizes_cached()
    wishes = {row.agent: row for row in LearnerSettings.objects.all()}
    usual, distances = learner_defaults(), gate_distances_cached(counts)
    experiments: dict[str, list[Experiment]] = {}
    for running in Experiment.objects.filter(status=Experiment.Status.RUNNING).order_by("name"):
        experiments.setdefault(running.agent, []).append(running)
    return [
        AgentCard(
            agent_facts(slug),
            counts.get(slug, NO_FEEDBACK),
            policies.get(slug),
            runs.get(slug),
            newest=newest_policies.get(slug),
            incumbent=incumbents.get(slug),
            buffer=waiting.get(slug, 0),
            fresh=fresh_sizes.get(slug, 0),
            retrain_threshold=(wishes.get(slug) or usual).min_samples_to_retrain,
            charts=policy_charts(by_agent.get(slug, [])),
            learner=_learner(fresh_sizes.get(slug, 0), wishes.get(slug) or usual),
            learns_by_itself=_learns_by_itself(wishes.get(slug) or usual),
            experiments=experiments.get(slug, ()),
            gate_refusal=gate_refusals.get(slug, ""),
            stopped_beside=beside.get(slug),
            distance=distances.get(slug),
        )
        for slug in sorted(slugs)
    ]


def _newest_kept(trained: Mapping[str, Sequence[Policy]]) -> dict[str, Policy]:
    """The newest trained policy of each agent, or the one that its run kept in its place."""
    newest = {agent: policies[-1] for agent, policies in trained.items()}
    chose = TrainingRun.objects.filter(policy__in=newest.values(), result__has_key="kept_run")
    return newest | {run.agent: run.kept_run.policy for run in chose}


NEWEST_SHOWN = 5
"""Policies, runs and experiments of an agent that its page lists."""


@dataclass(frozen=True)
class AgentOverview:
    """One agent with what its page lists, the newest first."""

    agent: Agent
    is_defined: bool
    """True if a row of the admin defines it."""
    counts: FeedbackCounts
    champion: Policy | None
    waiting: Policy | None
    """The newest policy where it stands before a gate; an older one only as challenger."""
    policies: Sequence[Policy]
    runs: Sequence[TrainingRun]
    experiments: Sequence[Experiment]
    charts: Sequence[Versions]


def agent_overview(slug: str) -> AgentOverview | None:
    """An agent with a file, a definition or settings, or any slug that decided something or was trained; None for
    another."""
    counts = feedback_counts_cached()
    incumbents_sync({slug: counts[slug]} if slug in counts else {})
    defined = AgentDefinition.objects.filter(slug=slug).exists()
    runs = TrainingRun.objects.filter(agent=slug).order_by("-pk")
    known = (
        slug in counts
        or slug in AGENTS
        or defined
        or runs.exists()
        or Policy.objects.filter(agent=slug).exists()
        or AgentSettings.objects.filter(agent=slug).exists()
    )
    if not known or not re.fullmatch(SLUG_PATTERN, slug):
        return None
    policies = list(Policy.objects.filter(agent=slug).defer("adapter_path").order_by("pk"))
    return AgentOverview(
        agent=agent_served(slug),
        is_defined=defined,
        counts=counts.get(slug, NO_FEEDBACK),
        champion=next((policy for policy in policies if policy.stage == Policy.Stage.CHAMPION), None),
        waiting=_waiting(policies),
        policies=policies[::-1][:NEWEST_SHOWN],
        runs=list(runs[:NEWEST_SHOWN]),
        experiments=list(Experiment.objects.filter(agent=slug).order_by("-pk")[:NEWEST_SHOWN]),
        charts=policy_charts(policies),
    )


def _waiting(policies: Sequence[Policy]) -> Policy | None:
    """The newest of an agent's trained policies where it stands before a gate, else its challenger."""
    trained = [policy for policy in policies if policy.has_files]
    newest = next(iter(_newest_kept({"": trained}).values())) if trained else None
    if newest is not None and newest.stage == Policy.Stage.CANDIDATE:
        return newest
    return next((policy for policy in trained[::-1] if policy.stage == Policy.Stage.CHALLENGER), None)


def _stopped_beside(runs: dict[str, TrainingRun]) -> dict[str, TrainingRun]:
    """Take runs that somebody tried beside a policy and that stopped out of `runs`, agent -> newest run, and put the
    newest that made a policy in their place. One the online learner started stays: the loop itself stands still."""
    stopped = {
        slug: run for slug, run in runs.items() if run.status in STOPPED_STATUSES and run.asked_by != LEARNER
    }
    if not stopped:
        return {}
    trained = TrainingRun.objects.filter(agent__in=stopped, policy__isnull=False).order_by("pk")
    before = {run.agent: run for run in trained}
    runs |= before
    return {slug: run for slug, run in stopped.items() if slug in before}


def _learns_by_itself(wanted: LearnerSettings) -> bool:
    return settings.ENABLE_ONLINE_LEARNING and wanted.enabled


def _learner(waiting: int, wanted: LearnerSettings) -> str:
    """State of the online learner for a buffer of this size, in words."""
    if not _learns_by_itself(wanted):
        return "online learning is off: start the next training yourself"
    if waiting >= wanted.min_samples_to_retrain:
        return "the next training starts soon"
    return f"{wanted.min_samples_to_retrain - waiting:,} more until the next training"


VERSIONS_SHOWN = 20
"""Newest versions drawn."""


FIGURES = (
    ("liked", "Liked answers", True),
    ("known_answer", "Correct by the known answer", True),
    ("preference_accuracy", "Preference accuracy", True),
    *((kind, TITLES[kind], True) for kind in (LABELS, OUTCOMES, TESTS)),
    ("average_reward", "Average reward", False),
)
"""Figures drawn over versions: name, title, and True if shown in percent."""


def policy_charts(policies: Sequence[Policy]) -> list[Versions]:
    """FIGURES over policies, oldest first; those alone that at least two of them have."""
    drawn = [policy_versions(policies, name, title, percent=percent) for name, title, percent in FIGURES]
    return [chart for chart in drawn if chart is not None]


def policy_versions(
    policies: Sequence[Policy], figure: str, title: str, *, percent: bool = True
) -> Versions | None:
    """A figure of [0, 1] over policies, oldest first; None with fewer than two that have it."""
    points = [
        (policy.name, str(policy.stage), share.value, share.low, share.high)
        for policy in policies
        if (share := share_of(policy.metrics, figure)) is not None
    ]
    return versions_of(title, points[-VERSIONS_SHOWN:], percent=percent) if len(points) > 1 else None


def policy_lineage(agent: str, policies: Sequence[Policy]) -> Lineage | None:
    """Family tree of an agent's newest trained policies, given oldest first with their parents. Hosted and recorded
    policies descend from none of them."""
    shown = [one for one in policies if one.has_files][-VERSIONS_SHOWN:]
    ever = PolicyEvent.objects.filter(policy__in=shown, to_stage=Policy.Stage.CHAMPION).order_by()
    return lineage_of(
        agent,
        [Descent(one.name, str(one.stage), one.parent.name if one.parent else "") for one in shown],
        set(ever.values_list("policy__name", flat=True)),
    )


def work_of(run: TrainingRun) -> Work:
    """What a run does now, with its stage and the evaluation of its policy, and how long it still needs."""
    status = TrainingRun.Status
    if run.status == status.QUEUED:
        others = TrainingRun.objects.filter(status=status.RUNNING, stage_of=None).order_by("pk")
        before = None if run.stage_of_id else others.first()
        words = "begins in a moment" if run.stage_of_id else "waits for a worker"
        words = f"waits until run {before.pk} of {before.agent} ends" if before else words
        return Work(run, words, run_eta_s(run))
    if run.status == status.RUNNING:
        step = f"step {run.steps_done} of {run.steps_total}" if run.steps_total else "starting"
        words = (_stage_at_work(run) or run).phase_words or step
        return Work(run, words, run_eta_s(run), stalled_text(run))
    kept = run.kept_run
    step = "exported" if kept.follow_up == TrainingRun.FollowUp.EXPORT else "evaluated"
    return Work(run, kept.phase_words or f"its policy is {step} next", None)


def _stage_at_work(run: TrainingRun) -> TrainingRun | None:
    return run.stages.filter(status=TrainingRun.Status.RUNNING).order_by("-pk").first()


STALLED_AFTER_S = 180.0
"""A running run stands still after so long without a step, or without a sign of life from its process."""
STALLED_STEPS = 5
"""Steps that take longer than that: it stands still after this many times its mean."""


def stalled_text(run: TrainingRun) -> str:
    """Such as `no step for 12 min`, once a running run stands still; empty while it goes on."""
    if run.status != TrainingRun.Status.RUNNING:
        return ""
    stage = _stage_at_work(run) or run
    now, beats = timezone.now(), [one.heartbeat_at for one in (run, stage) if one.heartbeat_at is not None]
    silent_s = (now - max(beats)).total_seconds() if beats else 0.0
    still_s = 0.0
    newest = stage.metrics.order_by("-step").first()
    # the figures of a resumed run are ahead of it: they say nothing about its steps now
    if newest is not None and newest.step <= stage.steps_done and stage.phase.endswith(TRAINING):
        begun = stage.phase_at or newest.at
        still_s = (now - max(newest.at, begun)).total_seconds()
        if still_s <= STALLED_STEPS * (newest.at - begun).total_seconds() / newest.step:
            still_s = 0.0
    longest = max(silent_s, still_s)
    if longest < STALLED_AFTER_S:
        return ""
    return f"{'no step' if stage.steps_done else 'no sign of life'} for {longest // 60:.0f} min"


def run_eta_s(run: TrainingRun) -> float | None:
    """Seconds a run still needs with its stages: by its steps, before them by the estimate it was ordered with; None
    where nothing can be said."""
    if not run.is_unfinished or (by_steps := _eta_by_steps(run)) is not None:
        return by_steps if run.is_unfinished else None
    stage, known = _stage_at_work(run), []
    if stage is not None and (of_stage := _eta_by_steps(stage)) is not None:
        known.append(of_stage)
    if (estimated_s := run.result.get("estimated_s")) is not None:
        spent = (timezone.now() - run.started_at).total_seconds() if run.started_at else 0.0
        known.append(estimated_s - spent)
    return max((seconds for seconds in known if seconds > 0), default=None)


def _eta_by_steps(run: TrainingRun) -> float | None:
    """Seconds until a running run has made its steps; None before the first."""
    if run.status != TrainingRun.Status.RUNNING or not run.steps_done or not run.steps_total:
        return None
    first = run.metrics.order_by("step").first()
    # before the first row of figures by the phase: a run begins with libraries and a model to load
    earlier = run.phase_at if run.phase.endswith(TRAINING) else run.started_at
    begun = first.at if first is not None and run.steps_done > first.step else earlier
    steps = run.steps_done - (first.step if first is not None and run.steps_done > first.step else 0)
    if begun is None or run.heartbeat_at is None or steps <= 0:
        return None
    spent = max((timezone.now() - begun).total_seconds(), 0.0)
    return spent / steps * (run.steps_total - run.steps_done)


def runs_newest(agent: str | None = None) -> QuerySet[TrainingRun]:
    """Runs, newest first, with their policies; the recipes and libraries are left in the database."""
    runs = TrainingRun.objects.defer("recipe", "libraries", "hardware").select_related(
        "policy", "reward_model"
    )
    return runs if agent is None else runs.filter(agent=agent)


def run_get(pk: int) -> TrainingRun | None:
    """One run with its snapshot, policy and metrics."""
    return (
        TrainingRun.objects.filter(pk=pk)
        .select_related("snapshot", "policy", "stage_of", "reward_model")
        .prefetch_related(Prefetch("metrics"))
        .first()
    )


def run_series(run: TrainingRun) -> dict[str, list[tuple[int, float]]]:
    """Figure -> its (step, value) points over a run, in the order of the steps."""
    series: dict[str, list[tuple[int, float]]] = {}
    for metric in run.metrics.all():
        for name, value in metric.values.items():
            if is_number(value):
                series.setdefault(name, []).append((metric.step, float(value)))
    return series


def policy_compared_first(policies: Sequence[Policy]) -> str:
    """Name of the policy that the newest is first compared with: the champion, or the one before it. Newest first."""
    others = sorted(policies[1:], key=lambda policy: policy.stage != Policy.Stage.CHAMPION)
    return others[0].name if others else ""


def policy_ancestors(policy: Policy) -> list[Policy]:
    """From the first ancestor to this one."""
    line, seen = [policy], {policy.pk}
    while line[-1].parent is not None and line[-1].parent.pk not in seen:
        line.append(line[-1].parent)
        seen.add(line[-1].pk)
    return line[::-1]


def policy_relatives(policy: Policy) -> list[Policy]:
    """Its ancestors, itself, and what descends from them directly, oldest first."""
    line = policy_ancestors(policy)
    near = Policy.objects.filter(Q(parent__in=line) | Q(pk__in=[one.pk for one in line]))
    return list(near.select_related("parent").order_by("pk"))


@dataclass(frozen=True)
class PolicyOverview:
    """One policy with everything an operator asks of it."""

    policy: Policy
    children: list[Policy]
    events: list[PolicyEvent]
    evaluations: list[Evaluation]
    artifacts: list[Artifact]
    liked: Share | None
    """Of its answers, those that people would like."""
    liked_against: Share | None
    known_answer: Share | None
    """Of held-out prompts with a known answer, those where it gives it."""
    headline: Headline | None
    valid_rate: Share | None
    average_reward: float | None
    simulated_share: float | None
    """Share of the feedback it learnt from that was simulated, 0 to 1; None where no snapshot is known."""


def policy_overview(policy: Policy) -> PolicyOverview:
    """Contents of the registry page of a policy, newest things first."""
    metrics = policy.metrics
    run = TrainingRun.objects.select_related("snapshot").filter(policy=policy).first()
    reward = metrics.get("average_reward")
    reward = reward.get("value") if isinstance(reward, Mapping) else reward
    return PolicyOverview(
        policy=policy,
        children=list(policy.children.order_by("id")),
        events=list(policy.events.all()[:EVENTS_SHOWN]),
        evaluations=list(policy.evaluations.all()[:EVENTS_SHOWN]),
        artifacts=list(policy.artifacts.all()),
        liked=share_of(metrics, "liked"),
        liked_against=share_of(metrics.get("liked") or {}, "against"),
        known_answer=share_of(metrics, "known_answer"),
        headline=headline_of(metrics),
        valid_rate=share_of(metrics, "valid_rate"),
        average_reward=reward if is_number(reward) else None,
        simulated_share=run.snapshot.simulated_share if run and run.snapshot else None,
    )
