"""Tables of decisions, ratings, comparisons and outcomes: append-only facts, constrained in the database."""

from __future__ import annotations

import hashlib
import json
import uuid

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator, RegexValidator
from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from backend.bodies import SLUG_PATTERN
from feedback.messages import Message
from feedback.models.imports import Withdrawal, batch_index, batch_link
from feedback.models.masks import MaskError, masks_read

agent_slug = RegexValidator(
    SLUG_PATTERN, "An agent is a slug of 1 to 64 lower-case letters, digits, - and _, such as support-bot."
)


def prompt_hash(agent: str, messages: list[Message]) -> str:
    """SHA-256 (64 hex digits) of an agent and its prompt: what counts as "the same prompt" everywhere.

    On which side of the split a prompt stands is stored under this value, so its definition never changes.
    """
    canonical = json.dumps([agent, messages], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


SHADOW = "shadow"
"""Source of an answer given beside the one a user got."""


def shadow_id(decision: uuid.UUID) -> uuid.UUID:
    """Id of the shadow answer to a decision's prompt; a decision has at most one."""
    return uuid.uuid5(decision, SHADOW)


def _share(name: str) -> Q:
    return Q(**{f"{name}__isnull": True}) | Q(**{f"{name}__gte": 0.0, f"{name}__lte": 1.0})


class RaterKind(models.TextChoices):
    HUMAN = "human", "a person"
    SIMULATED = "simulated", "simulated"


class AgentSettings(models.Model):
    """Settings of one agent's feedback as an operator wants it; without a row, the defaults here."""

    agent = models.CharField(max_length=64, unique=True, validators=[agent_slug])
    collection_rate = models.FloatField(
        default=1.0, help_text="Share of decisions kept, 0 to 1, by hash of their id"
    )
    ratings_wanted = models.PositiveSmallIntegerField(
        default=1, help_text="Ratings by people after which a decision leaves everyone's queue"
    )
    overlap_share = models.FloatField(
        default=0.0,
        help_text="Share of decisions, 0 to 1, that wait for `overlap_ratings`, so that agreement shows",
    )
    overlap_ratings = models.PositiveSmallIntegerField(default=2)
    masks = models.JSONField(
        default=list,
        db_default=[],
        blank=True,
        help_text='What is masked before it is stored: ["email", "phone", "iban", "card", {"name": "order", "pattern": '
        '"A-[0-9]+"}]',
    )

    class Meta:
        ordering = ["agent"]
        verbose_name_plural = "agent settings"
        constraints = [
            models.CheckConstraint(
                condition=Q(collection_rate__gte=0.0, collection_rate__lte=1.0),
                name="agent_collection_rate_in_0_1",
            ),
            models.CheckConstraint(
                condition=Q(overlap_share__gte=0.0, overlap_share__lte=1.0), name="agent_overlap_share_in_0_1"
            ),
            models.CheckConstraint(
                condition=Q(ratings_wanted__gte=1, overlap_ratings__gte=1), name="agent_wants_a_rating"
            ),
        ]

    def __str__(self) -> str:
        return self.agent

    def clean(self) -> None:
        try:
            masks_read(self.masks)
        except MaskError as error:
            raise ValidationError({"masks": str(error)}) from error


class Trace(models.Model):
    """Trace of an agent's run: steps, tool calls with results and errors, tasks, as its collector sent them."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    agent = models.CharField(max_length=64, validators=[agent_slug])
    run_id = models.CharField(max_length=200, blank=True, help_text="The app's own id of the run")
    steps = models.JSONField(help_text="[{kind, name, ...}, ...] in the order they happened")
    metadata = models.JSONField(default=dict, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    body_hash = models.CharField(max_length=64, blank=True, editable=False)
    import_batch = batch_link("traces")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [
            models.Index(fields=["agent", "-created_at"]),
            models.Index(fields=["run_id"]),
            batch_index("trace_imported"),
        ]

    def __str__(self) -> str:
        return f"{self.agent} trace {str(self.id)[:8]}"


class Decision(models.Model):
    """One prompt and the response given to it: by which policy, for which unit, with which propensity."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    agent = models.CharField(max_length=64, validators=[agent_slug])
    messages = models.JSONField(help_text="The prompt as chat messages: [{role, content}, ...]")
    prompt_hash = models.CharField(max_length=64, editable=False)
    response = models.TextField(help_text="The answer exactly as the policy gave it")
    reasoning = models.TextField(
        blank=True, default="", help_text="What the model thought before it answered"
    )
    state = models.JSONField(null=True, blank=True, help_text="What the app knew when it asked")
    candidates = models.JSONField(
        null=True,
        blank=True,
        help_text="The listed responses: texts, or {response, score} with a score in [0, 1]",
    )
    policy = models.CharField(
        max_length=200,
        blank=True,
        help_text="Name of the policy that answered, as it was then; empty: unknown",
    )
    unit = models.CharField(max_length=200, blank=True, help_text="The user or session this was decided for")
    arm = models.CharField(max_length=200, blank=True)
    propensity = models.FloatField(
        null=True, blank=True, help_text="Probability of the recorded choice, in (0, 1]"
    )
    run_id = models.CharField(
        max_length=200, blank=True, help_text="The app's own id of the run this belongs to"
    )
    latency_ms = models.FloatField(null=True, blank=True)
    tokens_in = models.PositiveIntegerField(null=True, blank=True)
    tokens_out = models.PositiveIntegerField(null=True, blank=True)
    tags = models.JSONField(default=list, blank=True)
    metadata = models.JSONField(default=dict, blank=True)
    trace = models.ForeignKey(
        Trace, null=True, blank=True, on_delete=models.PROTECT, related_name="decisions"
    )
    source = models.CharField(
        max_length=40, default="app", help_text="app, simulation, or the format it came from"
    )
    body_hash = models.CharField(
        max_length=64,
        blank=True,
        editable=False,
        help_text="SHA-256 of the request that made it: tells a retry from a conflict",
    )
    import_batch = batch_link("decisions")
    withdrawal = models.ForeignKey(
        Withdrawal,
        null=True,
        blank=True,
        editable=False,
        db_index=False,
        on_delete=models.PROTECT,
        related_name="decisions",
        help_text="The withdrawal that excluded it; empty: not withdrawn",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    # Derived, for the queue at a million rows; the only fields of a decision that ever change.
    ratings_human = models.PositiveSmallIntegerField(
        default=0, editable=False, help_text="Standing ratings by people"
    )
    ratings_wanted = models.PositiveSmallIntegerField(
        default=1, editable=False, help_text="0 while it is withdrawn: it is in no queue"
    )
    annotation_priority = models.FloatField(
        default=0.0,
        editable=False,
        help_text="0 to 2: the policy's uncertainty plus its raters' disagreement",
    )

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [
            models.Index(
                fields=["agent", "ratings_human", "-annotation_priority", "created_at", "id"],
                condition=Q(ratings_human__lt=F("ratings_wanted")),
                name="decision_asking_by_agent",
            ),
            models.Index(
                fields=["ratings_human", "-annotation_priority", "created_at", "id"],
                condition=Q(ratings_human__lt=F("ratings_wanted")),
                name="decision_asking",
            ),
            # the agent at the end, so that an agent that never had the policy is known without its decisions
            models.Index(
                fields=["policy", "ratings_human", "-annotation_priority", "created_at", "id", "agent"],
                condition=Q(ratings_human__lt=F("ratings_wanted")) & ~Q(policy=""),
                name="decision_asking_by_policy",
            ),
            # tells a prompt that nobody rated yet with one look
            models.Index(
                fields=["agent", "prompt_hash"],
                condition=Q(ratings_human__gt=0),
                name="decision_prompt_rated",
            ),
            models.Index(fields=["agent", "-created_at"]),
            models.Index(fields=["agent", "prompt_hash"]),
            models.Index(fields=["-created_at", "-id"]),
            models.Index(fields=["policy", "-created_at", "-id", "agent"], name="decision_newest_by_policy"),
            # the exposures of an experiment's arm
            models.Index(fields=["arm", "created_at"], condition=~Q(arm=""), name="decision_arm"),
            batch_index("decision_imported", "-created_at", "-id"),
            models.Index(
                fields=["withdrawal"], condition=Q(withdrawal__isnull=False), name="decision_withdrawn"
            ),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(propensity__isnull=True) | Q(propensity__gt=0.0, propensity__lte=1.0),
                name="decision_propensity_in_0_1",
            ),
            models.CheckConstraint(
                condition=Q(latency_ms__isnull=True) | Q(latency_ms__gte=0.0),
                name="decision_latency_not_negative",
            ),
            models.CheckConstraint(condition=~Q(agent=""), name="decision_has_agent"),
            models.CheckConstraint(condition=~Q(prompt_hash=""), name="decision_has_prompt_hash"),
        ]

    def __str__(self) -> str:
        return f"{self.agent} {str(self.id)[:8]}"


class Thumb(models.TextChoices):
    UP = "up", "good"
    DOWN = "down", "bad"


class Rating(models.Model):
    """Rating of one decision by one rater. Never changed: a new one supersedes, a withdrawal is a row too."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    decision = models.ForeignKey(Decision, on_delete=models.PROTECT, related_name="ratings")
    rater = models.CharField(max_length=200)
    rater_kind = models.CharField(max_length=12, choices=RaterKind, default=RaterKind.HUMAN)
    thumb = models.CharField(max_length=4, choices=Thumb, blank=True)
    stars = models.PositiveSmallIntegerField(null=True, blank=True)
    score = models.FloatField(null=True, blank=True)
    correction = models.TextField(null=True, blank=True, help_text="The response it should have been")  # noqa: DJ001
    tags = models.JSONField(default=list, blank=True)
    notes = models.TextField(blank=True)
    supersedes = models.OneToOneField(
        "self", null=True, blank=True, on_delete=models.PROTECT, related_name="superseded_by"
    )
    withdrawn = models.BooleanField(default=False, help_text="This row takes back the one it supersedes")
    body_hash = models.CharField(max_length=64, blank=True, editable=False)
    import_batch = batch_link("ratings")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [
            models.Index(fields=["rater", "-created_at"]),
            models.Index(fields=["-created_at"]),
            batch_index("rating_imported"),
        ]
        constraints = [
            # together with the one-to-one `supersedes`, one unbroken chain per decision and rater, so that two
            # clicks at once cannot both become the current rating
            models.UniqueConstraint(
                fields=["decision", "rater"],
                condition=Q(supersedes__isnull=True),
                name="rating_one_first_per_rater",
            ),
            models.CheckConstraint(
                condition=Q(stars__isnull=True) | Q(stars__gte=1, stars__lte=5), name="rating_stars_1_to_5"
            ),
            models.CheckConstraint(condition=_share("score"), name="rating_score_in_0_1"),
            models.CheckConstraint(condition=Q(thumb__in=["", "up", "down"]), name="rating_thumb_known"),
            models.CheckConstraint(condition=~Q(rater=""), name="rating_has_rater"),
            models.CheckConstraint(
                condition=Q(withdrawn=False) | Q(supersedes__isnull=False),
                name="rating_withdrawal_withdraws_something",
            ),
            models.CheckConstraint(
                condition=Q(withdrawn=True)
                | ~Q(thumb="")
                | Q(stars__isnull=False)
                | Q(score__isnull=False)
                | Q(correction__isnull=False)
                | ~Q(notes="")
                | ~Q(tags=[]),
                name="rating_says_something",
            ),
        ]

    def __str__(self) -> str:
        text = (
            self.thumb
            or (f"{self.stars} stars" if self.stars else "")
            or ("" if self.score is None else f"{self.score:g}")
        )
        return f"{self.rater}: {'withdrawn' if self.withdrawn else text or 'correction' if self.correction else text}"


class Preference(models.TextChoices):
    LEFT = "left", "left is better"
    RIGHT = "right", "right is better"
    TIE = "tie", "equally good"
    BOTH_BAD = "both_bad", "both bad"


class Comparison(models.Model):
    """One rater's preference between two decisions on the same prompt."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    left = models.ForeignKey(Decision, on_delete=models.PROTECT, related_name="comparisons_left")
    right = models.ForeignKey(Decision, on_delete=models.PROTECT, related_name="comparisons_right")
    rater = models.CharField(max_length=200)
    rater_kind = models.CharField(max_length=12, choices=RaterKind, default=RaterKind.HUMAN)
    preference = models.CharField(max_length=8, choices=Preference, blank=True)
    tags = models.JSONField(default=list, blank=True)
    notes = models.TextField(blank=True)
    supersedes = models.OneToOneField(
        "self", null=True, blank=True, on_delete=models.PROTECT, related_name="superseded_by"
    )
    withdrawn = models.BooleanField(default=False)
    body_hash = models.CharField(max_length=64, blank=True, editable=False)
    import_batch = batch_link("comparisons")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-created_at", "-id"]
        indexes = [
            models.Index(fields=["rater", "-created_at"]),
            models.Index(fields=["-created_at"]),
            batch_index("comparison_imported"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["left", "right", "rater"],
                condition=Q(supersedes__isnull=True),
                name="comparison_one_first_per_rater",
            ),
            models.CheckConstraint(condition=~Q(left=F("right")), name="comparison_of_two_decisions"),
            models.CheckConstraint(
                condition=Q(preference__in=["left", "right", "tie", "both_bad"])
                | Q(preference="", withdrawn=True),
                name="comparison_preference_known",
            ),
            models.CheckConstraint(condition=~Q(rater=""), name="comparison_has_rater"),
            models.CheckConstraint(
                condition=Q(withdrawn=False) | Q(supersedes__isnull=False),
                name="comparison_withdrawal_withdraws_something",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.rater}: {self.preference or 'withdrawn'}"


class Outcome(models.Model):
    """A measured fact about a decision that arrives later (`file_moved_back`, `ticket_reopened`)."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    decision = models.ForeignKey(Decision, on_delete=models.PROTECT, related_name="outcomes")
    name = models.CharField(max_length=64, validators=[agent_slug])
    value = models.FloatField()
    at = models.DateTimeField(default=timezone.now, help_text="When it happened in the app")
    body_hash = models.CharField(max_length=64, blank=True, editable=False)
    import_batch = batch_link("outcomes")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index(fields=["name", "-at"]), batch_index("outcome_imported")]
        constraints = [models.CheckConstraint(condition=~Q(name=""), name="outcome_has_name")]

    def __str__(self) -> str:
        return f"{self.name} = {self.value:g}"


class Lease(models.Model):
    """A decision shown to a rater, kept from the others until it runs out."""

    decision = models.ForeignKey(Decision, on_delete=models.CASCADE, related_name="leases")
    rater = models.CharField(max_length=200)
    until = models.DateTimeField()

    class Meta:
        ordering = ["until"]
        indexes = [models.Index(fields=["until"])]
        constraints = [models.UniqueConstraint(fields=["decision", "rater"], name="lease_once_per_rater")]

    def __str__(self) -> str:
        return f"{self.rater} until {self.until:%H:%M}"


class RatingRequest(models.Model):
    """A decision that the queue asks for before others: of a random sample, or where a rating may change a verdict."""

    class Purpose(models.TextChoices):
        VERDICT = "verdict", "may change a verdict"
        SAMPLE = "sample", "random sample"

    decision = models.ForeignKey(Decision, on_delete=models.CASCADE, related_name="requests")
    purpose = models.CharField(max_length=8, choices=Purpose)
    probability = models.FloatField(
        help_text="Chance that this decision was drawn among those that could have been"
    )
    place = models.FloatField(help_text="Random number in [0, 1) by which requests are ordered")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-purpose", "place"]
        constraints = [
            models.UniqueConstraint(fields=["decision", "purpose"], name="rating_request_once_per_purpose"),
            models.CheckConstraint(
                condition=Q(purpose__in=["verdict", "sample"]), name="rating_request_purpose_known"
            ),
            models.CheckConstraint(
                condition=Q(probability__gt=0, probability__lte=1), name="rating_request_probability_in_0_1"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.get_purpose_display()}: {self.decision_id}"


class ApiKey(models.Model):
    """A key of an app or a script. Only its SHA-256 is kept; the key itself is shown once, when it is made."""

    SCOPES = ("ingest", "rate", "rate_as", "read", "operate")

    name = models.CharField(max_length=100, unique=True)
    prefix = models.CharField(
        max_length=12, unique=True, editable=False, help_text="First characters, to tell keys apart"
    )
    key_hash = models.CharField(max_length=64, unique=True, editable=False)
    scopes = models.JSONField(default=list, help_text="Of ingest, rate, rate_as, read, operate")
    agent = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        help_text="Of a publishable key: the only agent it rates",
    )
    origin = models.CharField(
        max_length=200,
        blank=True,
        default="",
        db_default="",
        help_text="Of a publishable key: the only site it works on, such as https://shop.example",
    )
    budget_usd = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0.0)],
        help_text="US dollars a month for providers; then only local policies answer it. Empty: no limit",
    )
    budget_noticed_at = models.DateTimeField(null=True, blank=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["name"]
        verbose_name = "API key"

    def __str__(self) -> str:
        return self.name

    @property
    def ident(self) -> str:
        """Name of the caller in decisions, such as key:3."""
        return f"key:{self.pk}"
