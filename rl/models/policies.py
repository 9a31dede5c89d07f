"""The registry: policies, their upstreams, evaluations, exported files and history."""

from __future__ import annotations

import uuid

from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone

from feedback.selectors import SLUG_PATTERN
from rl.models.runs import HistoryRow, Snapshot, TrainingRun
from rl.statistics.assignment import BASE
from rl.statistics.sequential import BETTER, NOT_WORSE, OPEN, WORSE


class Upstream(models.Model):
    """An endpoint that answers with language models: a provider's, or the team's own.

    The API key is in an environment variable (`key_env`) or encrypted in the database (`key_encrypted`) under a key
    kept outside it. It is never shown, logged or exported.
    """

    class Dialect(models.TextChoices):
        OPENAI = "openai", "OpenAI chat completions"
        RESPONSES = "responses", "OpenAI responses"
        ANTHROPIC = "anthropic", "Anthropic messages"

    class Schemas(models.TextChoices):
        JSON_SCHEMA = "json_schema", "JSON schema"
        JSON_OBJECT = "json_object", "JSON object without a schema"
        NONE = "none", "not at all"

    name = models.CharField(max_length=64, unique=True, validators=[RegexValidator(SLUG_PATTERN)])
    url = models.CharField(max_length=500, help_text="Base URL, such as https://api.openai.com/v1")
    model = models.CharField(max_length=200, help_text="The provider's model id, such as gpt-5-mini")
    dialect = models.CharField(max_length=16, choices=Dialect, default=Dialect.OPENAI)
    schemas = models.CharField(
        max_length=16,
        choices=Schemas,
        default=Schemas.JSON_SCHEMA,
        help_text="How the endpoint is told the form of an answer",
    )
    key_env = models.CharField(
        max_length=100, blank=True, help_text="Environment variable that holds the API key"
    )
    key_encrypted = models.TextField(blank=True, editable=False)
    timeout_s = models.FloatField(default=60.0, help_text="Seconds an answer may take")
    connect_timeout_s = models.FloatField(default=5.0, help_text="Seconds a connection may take")
    concurrency = models.PositiveIntegerField(default=128, help_text="Requests at once, at most, per process")
    context_tokens = models.PositiveIntegerField(
        null=True, blank=True, help_text="Prompt and answer together, in tokens; empty: unknown"
    )
    forward_fields = models.BooleanField(
        default=False, help_text="Send the request's `metadata` and `user` to the endpoint"
    )
    price_in = models.FloatField(
        null=True,
        blank=True,
        help_text="US dollars per million prompt tokens; empty: the bundled price table",
    )
    price_cached = models.FloatField(
        null=True, blank=True, help_text="US dollars per million prompt tokens that the provider had cached"
    )
    price_out = models.FloatField(null=True, blank=True, help_text="US dollars per million tokens answered")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(
                condition=Q(dialect__in=["openai", "responses", "anthropic"]), name="upstream_dialect_known"
            ),
            models.CheckConstraint(
                condition=Q(timeout_s__gt=0) & Q(connect_timeout_s__gt=0), name="upstream_timeouts_positive"
            ),
            models.CheckConstraint(condition=Q(key_env="") | Q(key_encrypted=""), name="upstream_one_key"),
        ]

    def __str__(self) -> str:
        return self.name


APP_MODEL = "your app's model"
"""Title of a recorded policy whose decisions name none."""


class UnrecordedCost(models.Model):
    """What an agent's providers took in a month for answers that are no decisions: to graders, judges, evaluations."""

    agent = models.CharField(max_length=64)
    month = models.DateTimeField(help_text="Its beginning")
    cost_usd = models.FloatField(default=0.0)

    class Meta:
        ordering = ["agent", "month"]
        constraints = [
            models.UniqueConstraint(fields=["agent", "month"], name="unrecorded_cost_once_a_month")
        ]

    def __str__(self) -> str:
        return f"{self.agent}, {self.month:%Y-%m}"


class Policy(models.Model):
    """Whatever can answer for an agent. Trained policies are named `<agent>-v<feedback count>`."""

    class Kind(models.TextChoices):
        ADAPTER = "adapter", "LoRA adapter"
        LINEAR = "linear", "linear"
        HOSTED = "hosted", "hosted model"
        RECORDED = "recorded", "recorded answers"

    class Stage(models.TextChoices):
        CANDIDATE = "candidate"
        CHALLENGER = "challenger"
        CHAMPION = "champion"
        RETIRED = "retired"
        REJECTED = "rejected"

    name = models.CharField(max_length=200, unique=True)
    agent = models.CharField(max_length=64)
    kind = models.CharField(max_length=16, choices=Kind, default=Kind.ADAPTER)
    stage = models.CharField(max_length=16, choices=Stage, default=Stage.CANDIDATE)
    parent = models.ForeignKey(
        "self",
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="children",
        help_text="The champion it was compared with",
    )
    run = models.OneToOneField(
        TrainingRun, null=True, blank=True, on_delete=models.PROTECT, related_name="policy"
    )
    upstream = models.ForeignKey(
        Upstream,
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="policies",
        help_text="Of a hosted policy: the endpoint that is asked",
    )
    parameters = models.JSONField(
        default=dict,
        blank=True,
        help_text='Of a hosted policy: parameters sent with each request, such as {"temperature": 0.2}',
    )
    recorded_as = models.CharField(
        max_length=200,
        blank=True,
        help_text="Of a recorded policy: the policy name in its decisions; empty where they name none",
    )
    base_model = models.CharField(
        max_length=500, blank=True, help_text="Of a hosted policy: the provider's model id"
    )
    base_model_hash = models.CharField(max_length=100, blank=True)
    adapter_path = models.CharField(
        max_length=500,
        blank=True,
        help_text="Folder of the adapter or linear policy, relative to RATCHET_HOME where inside it",
    )
    adapter_sha256 = models.CharField(max_length=64, blank=True)
    feedback_count = models.PositiveIntegerField(default=0)
    metrics = models.JSONField(default=dict, help_text="Figures of the newest evaluation on the holdout")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["agent", "-id"]
        verbose_name_plural = "policies"
        indexes = [models.Index(fields=["agent", "stage"])]
        constraints = [
            models.UniqueConstraint(
                fields=["agent"], condition=Q(stage="champion"), name="policy_one_champion_per_agent"
            ),
            models.CheckConstraint(
                condition=Q(stage__in=["candidate", "challenger", "champion", "retired", "rejected"]),
                name="policy_stage_known",
            ),
            models.CheckConstraint(
                condition=Q(kind__in=["adapter", "linear", "hosted", "recorded"]), name="policy_kind_known"
            ),
            models.CheckConstraint(
                condition=Q(upstream__isnull=False) | ~Q(kind="hosted"),
                name="policy_hosted_has_upstream",
            ),
            models.CheckConstraint(
                condition=Q(kind__in=["hosted", "recorded"]) | ~Q(adapter_path=""),
                name="policy_trained_has_files",
            ),
            models.UniqueConstraint(
                fields=["agent", "recorded_as"],
                condition=Q(kind="recorded"),
                name="policy_recorded_once_per_name",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def title(self) -> str:
        """Name for sentences; of a recorded policy its app's name for it."""
        if self.kind != self.Kind.RECORDED:
            return self.name
        return self.recorded_as.strip() or APP_MODEL

    @property
    def has_files(self) -> bool:
        """True of policies trained here, with weights on disk."""
        return self.kind in (self.Kind.ADAPTER, self.Kind.LINEAR)


class Evaluation(models.Model):
    """Figures of a policy on held-out prompts, with its rival."""

    agent = models.CharField(max_length=64)
    policy = models.ForeignKey(
        Policy, null=True, blank=True, on_delete=models.PROTECT, related_name="evaluations"
    )
    checkpoint = models.CharField(max_length=500, blank=True, help_text="Where no policy was named")
    base_model = models.CharField(max_length=500)
    against = models.CharField(max_length=200, blank=True, help_text="`base`, a policy's name, or empty")
    snapshot = models.ForeignKey(
        Snapshot, null=True, blank=True, on_delete=models.PROTECT, related_name="evaluations"
    )
    split = models.CharField(max_length=16, default="holdout")
    samples = models.PositiveIntegerField()
    figures = models.JSONField()
    evidence = models.JSONField(default=dict, help_text="Per prompt what both sides did: what a gate asks")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["agent", "-id"])]

    def __str__(self) -> str:
        return f"evaluation {self.pk} of {self.policy or self.checkpoint}"


class Artifact(models.Model):
    """A file or folder exported from a policy."""

    policy = models.ForeignKey(Policy, on_delete=models.PROTECT, related_name="artifacts")
    format = models.CharField(max_length=16)
    quantization = models.CharField(max_length=16, blank=True)
    path = models.CharField(max_length=500, help_text="Relative to RATCHET_HOME where inside it")
    bytes = models.PositiveBigIntegerField()
    sha256 = models.CharField(max_length=64)
    checked = models.JSONField(default=dict, help_text="What was compared with the original, and the figures")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]
        constraints = [models.UniqueConstraint(fields=["policy", "path"], name="artifact_once_per_path")]

    def __str__(self) -> str:
        return f"{self.policy} {self.format} {self.quantization}".rstrip()


class EngineAdapter(models.Model):
    """A policy's adapter on one of the team's own servers, which gets traffic for it once it is proved."""

    engine = models.CharField(max_length=300, help_text="Host and port of the server, from LOCAL_BACKENDS")
    policy = models.CharField(max_length=200, help_text="Its name, under which a deleted one is unloaded too")
    proved_at = models.DateTimeField(
        null=True, help_text="When its probe answer differed from the base's; empty: it gets no traffic"
    )
    fault = models.TextField(blank=True, help_text="Why it does not answer there")
    tries = models.PositiveIntegerField(default=0, help_text="Failures in a row")
    try_after = models.DateTimeField(default=timezone.now, help_text="Nobody publishes it before this time")

    class Meta:
        ordering = ["engine", "id"]
        constraints = [models.UniqueConstraint(fields=["engine", "policy"], name="engine_adapter_once")]

    def __str__(self) -> str:
        return f"{self.policy} on {self.engine}"


class StoredFile(models.Model):
    """A file in the artefact store, by its path and its content."""

    path = models.CharField(max_length=500, unique=True, help_text="Relative to RATCHET_HOME")
    sha256 = models.CharField(max_length=64, db_index=True)
    bytes = models.PositiveBigIntegerField()
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    def __str__(self) -> str:
        return self.path


class PolicyEvent(HistoryRow):
    """History of a policy: who moved it, when, why, with which verdicts. Append-only."""

    class Kind(models.TextChoices):
        REGISTERED = "registered"
        EVALUATED = "evaluated"
        BENCHMARKED = "benchmarked"
        EXPORTED = "exported"
        GATED = "gated"
        DEPLOYED = "deployed"
        PRUNED = "pruned"
        PROMOTED = "promoted"
        REJECTED = "rejected"
        RETIRED = "retired"
        ROLLED_BACK = "rolled_back"
        WATCHED = "watched", "watched in use"

    policy = models.ForeignKey(Policy, on_delete=models.PROTECT, related_name="events")
    kind = models.CharField(max_length=16, choices=Kind)
    from_stage = models.CharField(max_length=16, blank=True)
    to_stage = models.CharField(max_length=16, blank=True)
    actor = models.CharField(max_length=200, help_text="Who did it: a user's name, or the command or job")
    reason = models.TextField(blank=True)
    forced = models.BooleanField(default=False)
    verdicts = models.JSONField(default=dict, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(forced=False) | ~Q(reason=""), name="event_forced_has_reason"),
        ]

    def __str__(self) -> str:
        return f"{self.policy}: {self.kind}"


class JudgingRound(models.Model):
    """A policy against an opponent on random prompts that neither was trained on."""

    class Status(models.TextChoices):
        WAITING = "waiting", "waits for a worker"
        ANSWERING = "answering", "answers are generated"
        RUNNING = "running"
        ENDED = "ended"
        FAILED = "failed"

    class Verdict(models.TextChoices):
        BETTER = BETTER, "better"
        NOT_WORSE = NOT_WORSE, "not worse by more than the margin"
        WORSE = WORSE, "worse"
        OPEN = OPEN, "open"

    agent = models.CharField(max_length=64)
    policy = models.ForeignKey(Policy, on_delete=models.PROTECT, related_name="judging_rounds")
    opponent = models.ForeignKey(
        Policy,
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="judging_rounds_against",
        help_text="Empty: the base model",
    )
    status = models.CharField(max_length=12, choices=Status, default=Status.WAITING)
    prompts = models.PositiveIntegerField(help_text="Prompts, at most")
    raters = models.PositiveSmallIntegerField(default=1, help_text="Judgements that each prompt needs")
    margin = models.FloatField(
        default=0.1, help_text="Loss of win share below one half that counts as not worse, in [0, 0.5)"
    )
    not_inferior = models.BooleanField(
        default=False, db_default=False, help_text='Ends with "not worse", as the gate asks no more'
    )
    judge = models.ForeignKey(
        Policy,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="rounds_judged",
        help_text="Policy that judged the pairs beside people",
    )
    attempt = models.PositiveIntegerField(help_text="Number of the round against this opponent, from 1")
    alpha = models.FloatField(help_text="Probability that a policy no better is called better")
    verdict = models.CharField(max_length=12, choices=Verdict, blank=True, help_text="Empty until it ended")
    result = models.JSONField(
        default=dict, blank=True, help_text="Counts and interval at the end; answers may be erased later"
    )
    reason = models.TextField(blank=True, help_text="Why it failed, was stopped, or has fewer prompts")
    created_by = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["agent", "status"])]
        constraints = [
            models.CheckConstraint(
                condition=Q(raters__gte=1) & Q(prompts__gte=1), name="judging_has_prompts"
            ),
            models.CheckConstraint(
                condition=Q(margin__gte=0) & Q(margin__lt=0.5), name="judging_margin_known"
            ),
            models.CheckConstraint(
                condition=~Q(status="ended") | ~Q(verdict=""), name="judging_end_has_verdict"
            ),
        ]

    def __str__(self) -> str:
        return f"judging round {self.pk} of {self.policy}"

    @property
    def opponent_name(self) -> str:
        return self.opponent.name if self.opponent is not None else BASE

    @property
    def is_open(self) -> bool:
        """True while its pairs can be judged."""
        return self.status in (self.Status.ANSWERING, self.Status.RUNNING)


class JudgedPair(models.Model):
    """Both answers to one prompt. The prompt is in the decision it was taken from."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    round = models.ForeignKey(JudgingRound, on_delete=models.CASCADE, related_name="pairs")
    decision = models.UUIDField(help_text="The recorded decision whose prompt was asked")
    answer = models.TextField(help_text="The policy's")
    other_answer = models.TextField(help_text="The opponent's")
    same = models.BooleanField(help_text="Both answers do the same: a tie that nobody is asked about")
    judged = models.FloatField(
        null=True,
        blank=True,
        help_text="The judge's verdict: 1 the policy's is better, -1 the opponent's; null: none",
    )

    class Meta:
        ordering = ["round", "id"]
        constraints = [
            models.UniqueConstraint(fields=["round", "decision"], name="judged_pair_once_per_decision")
        ]

    def __str__(self) -> str:
        return f"pair of round {self.round_id}"


class PairJudgement(models.Model):
    """One rater's judgement of a pair. Evidence only: no training reads it."""

    class Preference(models.TextChoices):
        POLICY = "policy"
        OPPONENT = "opponent"
        TIE = "tie"
        BOTH_BAD = "both_bad", "both bad"

    pair = models.ForeignKey(JudgedPair, on_delete=models.CASCADE, related_name="judgements")
    rater = models.CharField(max_length=200)
    preference = models.CharField(max_length=8, choices=Preference)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["id"]
        constraints = [models.UniqueConstraint(fields=["pair", "rater"], name="judgement_once_per_rater")]

    def __str__(self) -> str:
        return f"{self.rater}: {self.preference}"


class BenchmarkResult(models.Model):
    """A policy and its base on the same items of a task, all figures in [0, 1]. The newest per policy
    and task counts."""

    policy = models.ForeignKey(Policy, on_delete=models.PROTECT, related_name="benchmarks")
    task = models.CharField(max_length=100, help_text="Name of the task")
    task_version = models.CharField(max_length=50, blank=True)
    task_sha256 = models.CharField(
        max_length=64, blank=True, help_text="Of the task's files; empty for a task of the hub"
    )
    source = models.CharField(max_length=500, help_text="`bundled`, `hub`, or the path of the task's folder")
    harness = models.CharField(max_length=50, help_text="Program that asked and scored, with its version")
    metric = models.CharField(max_length=100)
    fewshot = models.PositiveSmallIntegerField(default=0, help_text="Solved examples before each item")
    chat_template = models.BooleanField(help_text="Whether items were asked as chat messages")
    items_limit = models.PositiveIntegerField(
        null=True, blank=True, help_text="First items of the task alone; empty: all"
    )
    n = models.PositiveIntegerField(help_text="Items that both sides answered")
    figures = models.JSONField(
        help_text="own, base: value and standard error; difference: value with its 95 % interval and p"
    )
    items = models.JSONField(help_text="Per item its hash, and the scores of policy and base")
    base_model_hash = models.CharField(max_length=100)
    seconds = models.FloatField()
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["policy", "task", "-id"])]
        constraints = [models.CheckConstraint(condition=Q(n__gte=1), name="benchmark_has_items")]

    def __str__(self) -> str:
        return f"{self.task} of {self.policy}"
