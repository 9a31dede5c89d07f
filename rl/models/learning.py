"""Agents as operators set them: base model, definition, learning, gate, golden cases, serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone

from feedback.selectors import SLUG_PATTERN
from rl.agents import AGENTS
from rl.agents.template import TemplateAgent, places_of, schema_check
from rl.gates.report import GateBounds, GateError
from rl.models.policies import Policy
from rl.recipes import ONLINE_LEARNING_CONFIG, RecipeError
from rl.recipes.methods import PLANS, method_named, policy_methods

BOUNDS = GateBounds()


def method_choices() -> list[tuple[str, str]]:
    """Methods by which an agent may learn by itself."""
    return [("auto", "auto: chosen by the feedback"), *((slug, slug) for slug in (*policy_methods(), *PLANS))]


agent_slug = RegexValidator(SLUG_PATTERN)


class LearnerSettings(models.Model):
    """Settings of an agent's online learning. Without a row: `ONLINE_LEARNING_CONFIG`."""

    class Gate(models.TextChoices):
        CHAMPION = "champion", "champion: if shown to be better, it answers everybody"
        CHALLENGER = "challenger", "challenger: if not shown to be worse, an experiment decides"
        NONE = "none", "none: a person decides"

    class Start(models.TextChoices):
        BASE = "base", "the base model"
        CHAMPION = "champion", "the champion's adapter"

    agent = models.CharField(max_length=64, unique=True, validators=[agent_slug])
    enabled = models.BooleanField(default=True, help_text="Also needs ENABLE_ONLINE_LEARNING")
    min_samples_to_retrain = models.PositiveIntegerField(
        default=ONLINE_LEARNING_CONFIG["min_samples_to_retrain"],
        help_text="New pieces of feedback that start a retrain",
    )
    max_buffer_size = models.PositiveIntegerField(
        default=ONLINE_LEARNING_CONFIG["max_buffer_size"],
        help_text="Most new pieces of feedback in one retrain, newest first; the rest waits for the next",
    )
    retrain_interval_hours = models.FloatField(
        default=ONLINE_LEARNING_CONFIG["retrain_interval_hours"],
        help_text="Hours after which a smaller buffer starts a retrain too; also the pause after a failed run",
    )
    method = models.CharField(max_length=32, choices=method_choices, default=ONLINE_LEARNING_CONFIG["method"])
    start_from = models.CharField(max_length=16, choices=Start, default=ONLINE_LEARNING_CONFIG["start_from"])
    replay_share = models.FloatField(
        default=ONLINE_LEARNING_CONFIG["replay_share"],
        help_text="Share of the prompts with older feedback that is trained on again, 0 to 1",
    )
    gate = models.CharField(max_length=16, choices=Gate, default=ONLINE_LEARNING_CONFIG["gate"])
    auto_export = models.BooleanField(default=ONLINE_LEARNING_CONFIG["auto_export"])
    auto_deploy = models.BooleanField(default=ONLINE_LEARNING_CONFIG["auto_deploy"])
    auto_rollback = models.BooleanField(
        default=ONLINE_LEARNING_CONFIG["auto_rollback"],
        help_text="Roll back when people's ratings of the champion are significantly lower than of the one "
        "before",
    )
    keep_best = models.PositiveSmallIntegerField(
        default=ONLINE_LEARNING_CONFIG["keep_best"],
        help_text="Number of the best retired policies whose files are kept",
    )
    keep_newest = models.PositiveSmallIntegerField(
        default=ONLINE_LEARNING_CONFIG["keep_newest"],
        help_text="Number of the newest policies whose files are kept",
    )

    class Meta:
        ordering = ["agent"]
        verbose_name_plural = "learner settings"
        constraints = [
            models.CheckConstraint(
                condition=Q(replay_share__gte=0.0, replay_share__lte=1.0), name="learner_replay_in_0_1"
            ),
            models.CheckConstraint(
                condition=Q(min_samples_to_retrain__gte=1, max_buffer_size__gte=1),
                name="learner_wants_a_sample",
            ),
        ]

    def __str__(self) -> str:
        return self.agent


class Learnt(models.Model):
    """A piece of feedback that a run read for the first time, and its use. It counts if the run succeeded and made a
    policy.

    Only the id of the feedback is stored: it may be erased, and the fact stays.
    """

    class Use(models.TextChoices):
        TRAINED = "trained", "made a row that was trained on"
        HELD_OUT = "held_out", "made a held-out row"
        LEFT_OUT = "left_out", "made no row"

    run = models.ForeignKey("rl.TrainingRun", on_delete=models.CASCADE, related_name="learnt")
    feedback = models.UUIDField(
        help_text="Id of a rating, comparison or outcome; or of a decision that was a demonstration, or whose "
        "trace spoke"
    )
    use = models.CharField(max_length=8, choices=Use, default=Use.LEFT_OUT)

    class Meta:
        verbose_name_plural = "learnt"
        indexes = [models.Index(fields=["feedback"])]
        constraints = [
            models.UniqueConstraint(fields=["run", "feedback"], name="learnt_once_per_run"),
            models.CheckConstraint(
                condition=Q(use__in=["trained", "held_out", "left_out"]), name="learnt_use_known"
            ),
        ]

    def __str__(self) -> str:
        return f"run {self.run_id}: {self.feedback}"


class GateSettings(models.Model):
    """Bounds of one agent's gate. Without a row: the defaults of `rl.gates.report.GateBounds`."""

    agent = models.CharField(max_length=64, unique=True, validators=[agent_slug])
    min_evidence = models.PositiveIntegerField(default=BOUNDS.min_evidence, help_text="Held-out prompts")
    alpha = models.FloatField(
        default=BOUNDS.alpha,
        help_text="Probability of promoting a policy that is no better, over all comparisons on a holdout",
    )
    margin = models.FloatField(
        default=BOUNDS.margin, help_text="Value that the lower bound of the gain must exceed, 0 to 1"
    )
    not_inferior = models.FloatField(
        default=BOUNDS.not_inferior,
        db_default=BOUNDS.not_inferior,
        help_text="Loss of right answers that must be ruled out, such as 0.05; no gain is asked for then. 0: a gain "
        "is asked for",
    )
    max_reward_loss = models.FloatField(
        default=BOUNDS.max_reward_loss, help_text="Fall of the mean reward that must be ruled out"
    )
    max_invalid_gain = models.FloatField(
        default=BOUNDS.max_invalid_gain, help_text="Fall of the share of valid answers that must be ruled out"
    )
    max_kl = models.FloatField(default=BOUNDS.max_kl, help_text="Nats per token to the base model")
    max_general_kl = models.FloatField(
        default=BOUNDS.max_general_kl,
        help_text="Nats per token to the base model on general prompts, outside the agent's task",
    )
    max_general_loss = models.FloatField(
        default=BOUNDS.max_general_loss,
        help_text="Share of general prompts that the base answers in plain text and a policy may not, 0 to 1",
    )
    max_slice_loss = models.FloatField(default=BOUNDS.max_slice_loss)
    min_slice = models.PositiveIntegerField(default=BOUNDS.min_slice)
    max_length_ratio = models.FloatField(default=BOUNDS.max_length_ratio)
    max_rater_share = models.FloatField(default=BOUNDS.max_rater_share)
    max_off_policy_loss = models.FloatField(default=BOUNDS.max_off_policy_loss)
    benchmarks = models.CharField(
        max_length=1000,
        blank=True,
        default=BOUNDS.benchmarks,
        help_text="Benchmark tasks that must have been run (manage.py benchmark_model), with commas between; "
        "name=0.02 gives one its own bound",
    )
    max_benchmark_loss = models.FloatField(
        default=BOUNDS.max_benchmark_loss,
        help_text="Fall of a listed benchmark below the base that must be ruled out",
    )

    class Meta:
        ordering = ["agent"]
        verbose_name_plural = "gate settings"

    def __str__(self) -> str:
        return self.agent

    @property
    def bounds(self) -> GateBounds:
        """Raises GateError for a value outside its range."""
        return GateBounds(**{name: getattr(self, name) for name in asdict(BOUNDS)})

    def clean(self) -> None:
        try:
            _ = self.bounds
        except GateError as error:
            raise ValidationError(str(error)) from error


class GoldenCase(models.Model):
    """A decision that must be right: its prompt, accepted answers, forbidden answers."""

    agent = models.CharField(max_length=64, validators=[agent_slug])
    name = models.CharField(max_length=100)
    messages = models.JSONField(help_text='The prompt: [{"role": "user", "content": "..."}]')
    state = models.JSONField(null=True, blank=True, help_text="What the app knows, where the agent needs it")
    accepted = models.JSONField(
        default=list, blank=True, help_text="Responses that are right; empty: any valid one"
    )
    forbidden = models.JSONField(default=list, blank=True, help_text="Responses that are never right")
    active = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["agent", "name"]
        constraints = [models.UniqueConstraint(fields=["agent", "name"], name="golden_case_once_per_name")]

    def __str__(self) -> str:
        return f"{self.agent}: {self.name}"

    def clean(self) -> None:
        turns = self.messages
        if not (
            isinstance(turns, list)
            and turns
            and all(isinstance(t, dict) and {"role", "content"} <= set(t) for t in turns)
        ):
            raise ValidationError({"messages": 'expected [{"role": "user", "content": "..."}, ...]'})
        for name in ("accepted", "forbidden"):
            given: object = getattr(self, name)
            if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
                raise ValidationError({name: "expected a list of texts"})
        if not self.accepted and not self.forbidden:
            raise ValidationError("expected at least one accepted or forbidden response")


# --- Settings of online learning ---


def learner_config() -> dict[str, Any]:
    """ONLINE_LEARNING_CONFIG with the operator's section `continuous_learning`. Raises RecipeError."""
    given = settings.RATCHET_CONFIG.get("continuous_learning", {})
    if unknown := sorted(set(given) - set(ONLINE_LEARNING_CONFIG)):
        raise RecipeError(
            f"continuous_learning: no knob {unknown[0]!r}; there are {', '.join(ONLINE_LEARNING_CONFIG)}"
        )
    config = {**ONLINE_LEARNING_CONFIG, **given}
    for name, choices in CHOICES.items():
        _one_of("continuous_learning: " + name, config[name], choices())
    return config


CHOICES: dict[str, Callable[[], Sequence[str]]] = {
    "method": lambda: [slug for slug, _ in method_choices()],
    "start_from": lambda: LearnerSettings.Start.values,
    "gate": lambda: LearnerSettings.Gate.values,
}
"""Setting -> its allowed values."""


def _one_of(name: str, found: object, allowed: Sequence[str]) -> None:
    if found not in allowed:
        raise RecipeError(f"{name}: expected one of {', '.join(allowed)}; found {found!r}")


def learner_checked(wanted: LearnerSettings) -> LearnerSettings:
    """The settings. Raises RecipeError if a row, written past the admin, holds an unknown value."""
    for name, choices in CHOICES.items():
        _one_of(
            f"learner settings of {wanted.agent}, {name} (change it in the admin under Learner settings)",
            getattr(wanted, name),
            choices(),
        )
    return wanted


def learner_settings(agent: str) -> LearnerSettings:
    """The agent's row, or unsaved defaults."""
    stored = LearnerSettings.objects.filter(agent=agent).first()
    if stored is not None:
        return stored
    return learner_defaults(agent)


def retrain_knobs(wanted: LearnerSettings, method: str) -> dict[str, object]:
    """Recipe knobs of a retrain: start of the weights, share of older feedback."""
    knobs = {"start_from": wanted.start_from, "replay_share": wanted.replay_share}
    known = method_named(method).presets["default"].as_dict()
    return {name: value for name, value in knobs.items() if name in known}


def learner_defaults(agent: str = "") -> LearnerSettings:
    """Unsaved settings of an agent without a row."""
    return LearnerSettings(agent=agent, **{k: v for k, v in learner_config().items() if k != "tick_seconds"})


class AgentBase(models.Model):
    """The base model of an agent. Without a row: the base of its newest run, else RATCHET_BASE_MODEL."""

    agent = models.CharField(max_length=64, unique=True, validators=[RegexValidator(SLUG_PATTERN)])
    base_model = models.CharField(
        max_length=500,
        help_text="Its training begins here, and it answers before there is a champion: bundled, smollm2, a model "
        "that was added, a folder, a hub name, a GGUF file, ollama:NAME or package:NAME",
    )

    class Meta:
        ordering = ["agent"]
        verbose_name = "base model of an agent"
        verbose_name_plural = "base models"

    def __str__(self) -> str:
        return f"{self.agent}: {self.base_model}"


class AgentDefinition(models.Model):
    """An agent without code: a system prompt, a prompt template and a JSON schema of the answer."""

    slug = models.CharField(max_length=64, unique=True, validators=[RegexValidator(SLUG_PATTERN)])
    title = models.CharField(max_length=100)
    description = models.CharField(max_length=300, blank=True)
    system_prompt = models.TextField(blank=True)
    template = models.TextField(
        default="{question}",
        help_text="The prompt, with {name} for each value of the state: Ticket: {ticket}",
    )
    schema = models.JSONField(null=True, blank=True, help_text="JSON schema of the answer; empty: free text")
    suggested_tags = models.JSONField(default=list, blank=True, help_text='["too long", "wrong"]')
    max_new_tokens = models.PositiveIntegerField(default=128, help_text="Longest answer, in tokens")

    class Meta:
        ordering = ["slug"]
        verbose_name = "agent without code"
        verbose_name_plural = "agents without code"

    def __str__(self) -> str:
        return self.slug

    @property
    def agent(self) -> TemplateAgent:
        return TemplateAgent(
            slug=self.slug,
            title=self.title,
            description=self.description,
            system_prompt=self.system_prompt,
            template=self.template,
            schema=self.schema,
            suggested_tags=tuple(self.suggested_tags),
            max_new_tokens=self.max_new_tokens,
        )

    def clean(self) -> None:
        # forms end lines with CR LF, which would be in every prompt
        self.system_prompt = self.system_prompt.replace("\r\n", "\n")
        self.template = self.template.replace("\r\n", "\n")
        faults: dict[str, object] = {}
        if self.slug in AGENTS:
            faults["slug"] = f"{self.slug} is an agent with a file of its own; choose another slug"
        if not places_of(self.template):
            faults["template"] = "expected at least one {name}, which takes a value of the state"
        if self.schema is not None:
            try:
                schema_check(self.schema)
            except ValueError as error:
                faults["schema"] = str(error)
        tags = self.suggested_tags
        if not isinstance(tags, list) or not all(isinstance(tag, str) and tag for tag in tags):
            faults["suggested_tags"] = 'expected a list of texts, such as ["too long"]'
        if not 1 <= (self.max_new_tokens or 0) <= 8192:
            faults["max_new_tokens"] = "expected 1 to 8192 tokens"
        if faults:
            raise ValidationError(faults)


IN_PROCESS = "in-process"
"""Backend that answers with llama.cpp in the web process."""


class ServingSettings(models.Model):
    """Serving defaults of an agent for requests that do not set them."""

    agent = models.CharField(max_length=64, unique=True, validators=[agent_slug])
    choose_temperature = models.FloatField(
        default=0.0,
        help_text="Temperature of choosing among candidates: 0 takes the best, 1 samples by the policy's "
        "probabilities",
    )
    epsilon = models.FloatField(
        default=0.0, help_text="Share of choices among candidates sampled uniformly (exploration), 0 to 1"
    )
    temperature = models.FloatField(
        null=True,
        blank=True,
        help_text="Temperature of free-text answers, 0 to 2; empty: greedy in process, else the server's default",
    )
    max_tokens = models.PositiveIntegerField(
        null=True, blank=True, help_text="Most tokens of an answer; empty: the agent's own limit"
    )
    budget_usd = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0.0)],
        help_text="US dollars a month for providers; then only local policies answer. Empty: no limit",
    )
    budget_noticed_at = models.DateTimeField(null=True, blank=True, editable=False)
    route_policy = models.CharField(
        max_length=200,
        blank=True,
        default="",
        db_default="",
        help_text="Policy trained here that answers where it is sure, while a hosted champion answers the rest; empty: "
        "the champion answers everything",
    )
    route_loss = models.FloatField(
        default=0.02,
        db_default=0.02,
        validators=[MinValueValidator(0.001), MaxValueValidator(0.5)],
        help_text="Share of all answers that may become worse by it, with 95 % certainty",
    )
    route_explore = models.FloatField(
        default=0.1,
        db_default=0.1,
        validators=[MinValueValidator(0.0), MaxValueValidator(1.0)],
        help_text="Share of requests that both answer, from whose judgements the threshold is set",
    )
    route_threshold = models.FloatField(
        null=True,
        blank=True,
        editable=False,
        help_text="From this confidence on, the own model answers; null: never",
    )
    route_report = models.JSONField(default=dict, db_default={}, editable=False)
    fallbacks = models.JSONField(
        default=list,
        blank=True,
        help_text="Policies that step in where the champion fails, in this order, such as "
        '["support-bot-v214", "base"]; empty: the base model, or nobody for a hosted champion',
    )

    class Meta:
        ordering = ["agent"]
        verbose_name_plural = "serving settings"
        constraints = [
            models.CheckConstraint(
                condition=Q(epsilon__gte=0.0, epsilon__lte=1.0), name="serving_epsilon_in_0_1"
            ),
            models.CheckConstraint(
                condition=Q(choose_temperature__gte=0.0)
                & (Q(temperature__isnull=True) | Q(temperature__gte=0.0, temperature__lte=2.0)),
                name="serving_temperature_not_negative",
            ),
        ]

    def __str__(self) -> str:
        return self.agent

    def clean(self) -> None:
        named = self.fallbacks
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise ValidationError(
                {"fallbacks": 'expected a list of names such as ["support-bot-v214", "base"]'}
            )
        able = Policy.objects.filter(agent=self.agent, name__in=named).exclude(kind=Policy.Kind.RECORDED)
        known = {*able.values_list("name", flat=True), "base"}
        if unknown := [name for name in named if name not in known]:
            expected = f"expected policies of agent {self.agent} that can be asked, or base"
            raise ValidationError({"fallbacks": f"{expected}; found {unknown[0]!r}"})
        own = Policy.objects.filter(agent=self.agent, name=self.route_policy).first()
        if self.route_policy and (own is None or not own.has_files):
            raise ValidationError(
                {
                    "route_policy": f"expected a policy of {self.agent} trained here, found {self.route_policy!r}"
                }
            )
