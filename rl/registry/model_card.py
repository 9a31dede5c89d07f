"""The model card of a policy, written only from facts in the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.installation import file_replace
from rl.gates.headlines import Headline, Share, headline_of, share_of
from rl.gates.report import GateReport
from rl.linear.model import WEIGHTS as LINEAR_WEIGHTS
from rl.models import Policy, PolicyEvent, TrainingRun
from rl.registry import service as registry
from rl.registry.gate_evidence import benchmark_command, benchmark_text, benchmarks_newest, no_benchmarks
from rl.registry.integrity import KINDS_WITHOUT_FILES

KNOBS = (
    "learning_rate",
    "epochs",
    "max_steps",
    "batch_size",
    "beta",
    "loss",
    "lora_r",
    "lora_alpha",
    "max_length",
    "feedback",
    "penalty",
    "features",
    "sft_weight",
    "start_from",
    "replay_share",
    "seed",
)


def _share(share: Share | None) -> str:
    if share is None:
        return "not measured"
    interval = f" [{share.interval}]" if share.interval else ""
    return f"{100 * share.value:.1f} %{interval}" + (f", n = {share.n}" if share.n else "")


def policy_card(policy: Policy) -> str:
    """Markdown: what the policy is, its data, method, figures, benchmarks, gate report and limits."""
    run = TrainingRun.objects.select_related("snapshot").filter(policy=policy).first()
    lines = [
        *_kind(policy),
        f"- compared with: {policy.parent.name if policy.parent else 'the base model'}",
        "",
        "## Data",
        "",
        *_data(run),
        "",
        "## Method",
        "",
        *_method(run),
        "",
        "## Figures on held-out prompts",
        "",
        *_figures(policy),
        "",
        "## Benchmarks",
        "",
        *_benchmarks(policy),
        "",
        "## Gate",
        "",
        *_gate(policy),
        "",
        "## Limits",
        "",
        *_limits(policy, run),
        "",
    ]
    return "\n".join(lines)


def _kind(policy: Policy) -> list[str]:
    """Header, description and checksums."""
    if not policy.has_files:
        return [
            f"# {policy.name}",
            "",
            f"{policy.title[:1].upper()}{policy.title[1:]}, {KINDS_WITHOUT_FILES[policy.kind]}, for the agent "
            f"`{policy.agent}`, stage *{policy.stage}*, since {policy.created_at:%Y-%m-%d %H:%M} UTC.",
            "",
        ]
    linear = policy.kind == Policy.Kind.LINEAR
    library, tag = ("scikit-learn", "linear") if linear else ("peft", "lora")
    origin = f"for the agent `{policy.agent}`, stage *{policy.stage}*, made {policy.created_at:%Y-%m-%d %H:%M} UTC."
    header = ["---", f"library_name: {library}"]
    if not linear:
        header.append(f"base_model: {policy.base_model}")
    header += [f"tags: [ratchet, preference-learning, {tag}]", "---", f"# {policy.name}", ""]
    if linear:
        return [
            *header,
            f"A linear policy (regularised logistic regression) {origin}",
            "",
            "- base model: none; it picks an answer and writes none",
            f"- `{LINEAR_WEIGHTS}` SHA-256: `{policy.adapter_sha256}`",
        ]
    return [
        *header,
        f"A LoRA adapter {origin}",
        "",
        f"- base model: `{policy.base_model}` (SHA-256 {policy.base_model_hash[:16] or 'not known'})",
        f"- adapter SHA-256: `{policy.adapter_sha256}`",
    ]


def _data(run: TrainingRun | None) -> list[str]:
    snapshot = run.snapshot if run else None
    if run is None or snapshot is None:
        return ["Not known: it was not trained by a run recorded here."]
    counts = ", ".join(f"{count} {split}" for split, count in snapshot.counts.items())
    left = ", ".join(f"{count} {reason}" for reason, count in snapshot.left_out.items()) or "nothing"
    return [
        f"- trained on {run.feedback_count} ratings, comparisons, outcomes, traces and demonstrations",
        f"- {snapshot.feedback_count} ratings and comparisons were read, "
        f"{100 * snapshot.simulated_share:.0f} % of them simulated",
        f"- {snapshot.kind}: {counts}",
        f"- left out: {left}",
        f"- snapshot {snapshot.pk}, SHA-256 `{snapshot.sha256}`",
    ]


def _method(run: TrainingRun | None) -> list[str]:
    if run is None:
        return ["Not known."]
    knobs = ", ".join(f"{knob} {run.recipe[knob]}" for knob in KNOBS if knob in run.recipe)
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(run.libraries.items()))
    return [
        f"- {run.method}, preset {run.config or 'none'}: {knobs}",
        f"- {run.steps_done} steps{f' in {run.seconds:.0f} s' if run.seconds else ''}",
        f"- code {run.code_version}; {libraries or 'libraries not known'}",
    ]


def _figures(policy: Policy) -> list[str]:
    metrics: dict[str, Any] = policy.metrics
    if not metrics:
        return ["Not evaluated yet."]
    rows = [
        f"- {metrics[name]['words']}"
        for name in ("liked", "known_answer", "fields", "general")
        if metrics.get(name)
    ]
    rows += [
        _headline(headline_of(metrics)),
        f"- valid answers: {_share(share_of(metrics, 'valid_rate'))}",
    ]
    found = headline_of(metrics)
    if found is not None and found.gain:
        gain = f"- against {metrics.get('against')}: {found.gain} [{found.gain_interval}]"
        rows.append(gain.replace("\u202f", " "))
    return rows


def _headline(found: Headline | None) -> str:
    if found is None:
        return "- the held-out evidence has no ratings that differ, so nothing is compared"
    interval = f" [{found.interval}]" if found.interval else ""
    prompts = f", n = {found.figure.n}" if found.figure.n else ""
    text = f"- {found.title.lower()}: {found.text}{interval}{prompts} ({found.explanation})"
    return text.replace("\u202f", " ")


def _benchmarks(policy: Policy) -> list[str]:
    if words := no_benchmarks(policy):
        return [f"None: {words}."]
    results = benchmarks_newest(policy)
    if not results:
        return [f"None were run: `{benchmark_command(policy, 'ratchet_format,ratchet_options')}`."]
    return [f"- {benchmark_text(one)}; {one.harness}, {one.created_at:%Y-%m-%d}" for one in results]


def _gate(policy: Policy) -> list[str]:
    event = (
        policy.events.filter(kind__in=[PolicyEvent.Kind.GATED, PolicyEvent.Kind.PROMOTED])
        .exclude(verdicts={})
        .first()
    )
    if event is None:
        return ["No gate report yet."]
    report = GateReport.read(event.verdicts)
    forced = [f"**Promoted by force** by {event.actor}: {event.reason}", ""] if event.forced else []
    return forced + [
        f"- {verdict.rule}: {verdict.outcome}, {verdict.words}"
        for verdict in (report.verdicts if report else ())
    ]


def _limits(policy: Policy, run: TrainingRun | None) -> list[str]:
    limits = [
        "- It was evaluated on held-out prompts of this agent only; results on other prompts may differ.",
        "- The figures measure agreement with raters, not truth.",
    ]
    snapshot = run.snapshot if run else None
    if snapshot is not None and snapshot.simulated_share > 0:
        limits.append(
            "- Part of the feedback is simulated: to that extent the figures say nothing about "
            "people's preferences."
        )
    found = headline_of(policy.metrics)
    if found is not None and found.figure.n is not None and found.figure.n < 100:
        limits.append(f"- Only {found.figure.n} {found.of}: small losses cannot be detected.")
    return limits


def card_write(policy: Policy) -> Path | None:
    """Writes the card as README.md beside the adapter; returns None if its files are gone."""
    folder = registry.home_path(policy.adapter_path)
    if not policy.has_files or not folder.is_dir():
        return None
    path = folder / "README.md"
    file_replace(path, policy_card(policy))
    return path
