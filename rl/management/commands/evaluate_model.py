"""Judge a policy on held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser
from rich.table import Table

from backend import next_steps
from backend.command import RatchetCommand
from backend.disks import file_replace
from rl.datasets.gate_distance import gate_distance
from rl.datasets.prompt_clusters import cluster_text
from rl.evaluation.service import EvaluationOrder, evaluate
from rl.gates.evidence_kinds import CORRECTIONS, KINDS, LABELS, OUTCOMES, PAIRS, REWARDS, UNITS
from rl.gates.evidence_kinds import MEASURES as EVIDENCE_MEASURES
from rl.gates.headlines import TITLES, baseline_text, fields_text, liked_of, right_answer_figure
from rl.gates.report import GeneralAnswers
from rl.management.base_model_option import base_model_given
from rl.models import Policy
from rl.registry import gate_evidence
from rl.registry.checklist import policy_verdict


class Command(RatchetCommand):
    help = (
        "Evaluate a policy on held-out prompts: preference accuracy, valid answers and rewards, alone or "
        "against another policy. Example: manage.py evaluate_model --policy widgets-v312 --compare-base"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        add("--policy", metavar="NAME", help="A registered policy. Example: --policy widgets-v312")
        add(
            "--checkpoint",
            type=Path,
            metavar="DIR",
            help="An adapter folder, in place of --policy. Example: --checkpoint var/runs/17/checkpoint-50",
        )
        add(
            "--agent",
            metavar="SLUG",
            help="Agent whose held-out feedback is used (default: the policy's). Example: --agent filer",
        )
        add(
            "--test-data",
            type=Path,
            metavar="F",
            help="A file of feedback in any known format, in place of the held-out prompts. Example: "
            "--test-data test.jsonl",
        )
        add("--compare-base", action="store_true", help="Compare with the base model on the same prompts.")
        add(
            "--compare",
            metavar="POLICY",
            help="Compare on the same prompts: `incumbent` (who answers users today: the champion, at first the "
            "app's own model by its recorded answers), `base` (as --compare-base), or a policy's name. Example: "
            "--compare incumbent",
        )
        add(
            "--base-model",
            metavar="NAME_OR_PATH",
            help="Base model of the adapter: a folder, a Hugging Face name, a GGUF file, ollama:NAME, package:NAME or "
            "smollm2 (default: the one it was trained on). Example: --base-model smollm2",
        )
        add(
            "--no-quantization",
            action="store_true",
            help="Load the base model in full precision (the default of this command).",
        )
        add(
            "--quantization",
            choices=["none", "4bit", "gguf"],
            default="none",
            help="Load the base model in 4-bit, or also answer the same prompts with llama.cpp on the base's GGUF "
            "file (default none). Example: --quantization gguf",
        )
        add(
            "--max-samples",
            type=int,
            metavar="N",
            help="Use at most N rows of each kind of evidence (default: all). Example: --max-samples 200",
        )
        add(
            "--reward",
            action="append",
            default=[],
            metavar="SPEC",
            help="Reward function or reward model that scores generated answers to held-out prompts, as for "
            "train_grpo; repeatable. Example: --reward model:assistant-rm-v120",
        )
        add(
            "--output",
            type=Path,
            metavar="F",
            help="Also write the JSON result to this file. Example: --output results.json",
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        base_model = base_model_given(options["base_model"], self)
        order = EvaluationOrder(
            policy=options["policy"],
            checkpoint=options["checkpoint"],
            agent=options["agent"],
            test_data=options["test_data"],
            compare_base=options["compare_base"],
            compare=options["compare"],
            base_model=base_model,
            quantization="none" if options["no_quantization"] else options["quantization"],
            max_samples=options["max_samples"],
            rewards=",".join(options["reward"]),
        )
        with self.bar("evaluating") as bar:
            result = evaluate(order, bar.update)
        result["why"] = None if options["test_data"] else self.why(result)
        if options["output"]:
            text = json.dumps(result, indent=2, ensure_ascii=False, default=str) + "\n"
            file_replace(options["output"], text)
        return result

    @staticmethod
    def why(result: dict[str, Any]) -> dict[str, Any] | None:
        """Verdict of the policy, where this was the comparison that the gate asks about."""
        policy = Policy.objects.filter(name=result["policy"]).first()
        comparison = result.get("comparison")
        if policy is None or comparison is None:
            return None
        if comparison["against"] != gate_evidence.rival_name(policy):
            return None
        return policy_verdict(policy).as_dict()

    def show(self, result: dict[str, Any]) -> None:
        comparison, why = result.get("comparison"), result["why"]
        if why:
            self.stdout.write(why["words"])
            if why["basis"]:
                self.stdout.write(why["basis"])
            if why["action"]:
                self.stdout.write(f"What is next: {why['action']['words']}.")
        liked = liked_of(result)
        self.stdout.write(liked["words"] if liked else LIKED_UNKNOWN)
        if words := right_text(result):
            self.stdout.write(words)
        if not why and (knowledge := right_answer_figure(result)) is not None:
            self.stdout.write(knowledge["words"])
        self.stdout.write(evidence_text(result))
        if words := fields_text(result):
            self.stdout.write(words)
        if general := result.get("general"):
            self.stdout.write(GeneralAnswers(**general).words)
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("held out")
        table.add_column(result["policy"], justify="right")
        if comparison:
            table.add_column(comparison["against"], justify="right")
        if liked is not None:
            table.add_row(
                "liked answers", share_text(liked), *([share_text(liked["against"])] if comparison else [])
            )
        for kind, figures in result["evidence"].items():
            if kind != PAIRS:
                table.add_row(TITLES[kind].lower(), *kind_cells(figures, bool(comparison)))
        sides = [result, *([comparison] if comparison else [])]
        for key, label in MEASURES.items():
            if any(cells := [share_text(side.get(key)) for side in sides]):
                table.add_row(label, *cells)
            if any(cells := [share_text((side.get("written") or {}).get(key)) for side in sides]):
                table.add_row("... as free text", *cells)
        self.console.print(table)
        if quantised := result.get("quantised"):
            self.stdout.write(quantised_text(quantised))
        for kind in (LABELS, OUTCOMES):
            if knowledge := result["evidence"].get(kind, {}).get("probability_liked"):
                self.stdout.write(knowledge_text(knowledge))
        if result["simulated_share"]:
            self.stdout.write(
                f"{100 * result['simulated_share']:.0f} % of the held-out ratings are SIMULATED."
            )
        for kind, figures in result["evidence"].items():
            if figures.get("judge"):
                self.stdout.write(f"Rewards are given by {figures['judge']}.")
            if figures.get("barred"):
                self.stdout.write(f"WARNING: the gate does not use {kind}: {figures['barred']}.")
        if comparison and not why:
            self.stdout.write(verdict(result))
        elif not comparison and "look" in result and not result.get("holdout_prompts"):
            self.stdout.write(look_text(result["look"]))
        if words := cluster_text(result.get("clusters") or {}):
            self.stdout.write(f"{words}.")
        if count := result.get("holdout_prompts"):
            self.stdout.write(
                f"{count:,} prompts of this file are held-out prompts of the agent, so the "
                f"gate counts this evaluation as use {result['look']} of the holdout."
            )
        if words := baseline_text(result):
            self.stdout.write(words)
        self.stdout.write(off_policy_text(result["off_policy"]))
        if result["seen_in_training"]:
            self.stdout.write(
                f"{result['seen_in_training']:,} rows left out: the policy was trained on their prompts."
            )

    def next_step(self, result: dict[str, Any]) -> str:
        return next_after_evaluation(result)


def right_text(result: dict[str, Any]) -> str:
    """Right answers of the policy, the incumbent and the base in one sentence; empty where none are known."""
    right = dict(result["right"])
    if not (own := right.pop("policy", None)):
        return ""
    names = {"incumbent": result.get("incumbent", {}).get("title", ""), "base": "the base model"}
    sides = [f"{names[side]} in {count_text(found)}" for side, found in right.items()]
    return f"Right in {count_text(own)} held-out prompts{'; ' if sides else ''}{'; '.join(sides)}."


def count_text(found: dict[str, Any]) -> str:
    """A share as `43 of 58`."""
    return f"{round(found['value'] * found['n']):,} of {found['n']:,}"


def quantised_text(found: dict[str, Any]) -> str:
    """Answers on the quantised base beside those in full precision, in one sentence."""
    right = f", right {share_text(found['ground_truth'])}" if found["ground_truth"] else ""
    return (
        f"On the quantised base ({Path(found['base_file']).name}, llama.cpp): the same answer to "
        f"{share_text(found['same_answers'])}, valid {share_text(found['valid_rate'])}, average reward "
        f"{share_text(found['average_reward'])}{right}."
    )


def look_text(look: int) -> str:
    """The price of figures of the holdout that were shown without a comparison, in one sentence."""
    return (
        f"Use {look} of this holdout. Picking policies by held-out figures biases them upwards, so the "
        "gate corrects for every use, with or without a comparison. An evaluation on other prompts "
        "(--test-data FILE) is not counted."
    )


LIKED_UNKNOWN = "Share of liked answers: not known, as none of its answers to held-out prompts is rated."

MEASURES = {
    "preference_accuracy": "preference accuracy",
    "preference_accuracy_length_normalised": "... per token",
    "valid_rate": "valid answers",
    "ground_truth": "agrees with the known answer",
    "average_reward": "average reward",
}


def next_after_evaluation(result: dict[str, Any]) -> str:
    """Promote where the gate would open, else what would open it; a comparison where there is none yet."""
    policy = Policy.objects.filter(name=result["policy"]).first()
    if policy is None:
        return ""
    report = gate_evidence.policy_judge(policy)
    if report is None:
        rival = gate_evidence.rival_name(policy)
        return next_steps.after_training(policy.name, "" if rival == "base" else rival)
    if policy.stage not in (Policy.Stage.CANDIDATE, Policy.Stage.CHALLENGER):
        return ""
    if report.passed:
        return next_steps.after_gate_opens(policy.name)
    if report.harmful:
        return next_steps.after_harm(policy.name, policy.agent, report.reason)
    return next_steps.after_gate_stays_closed(policy.agent, gate_distance(policy.agent).further)


def share_text(figure: dict[str, Any] | None) -> str:
    if not figure or figure.get("value") is None:
        return ""
    if figure.get("low") is None or "n" not in figure:
        return f"{100 * figure['value']:.1f} %"
    return f"{100 * figure['value']:.1f} % [{100 * figure['low']:.1f}, {100 * figure['high']:.1f}] n={figure['n']:,}"


def off_policy_text(found: dict[str, Any]) -> str:
    """Reward it would have earned on logged choices, in one sentence, or why nobody can say."""
    if "refused" in found:
        return f"No off-policy estimate: {found['refused']}."
    best = found["doubly_robust"]
    text = (
        f"Off-policy estimate on {found['decisions']:,} logged decisions: average reward {best['value']:.3f} "
        f"[{best['low']:.3f}, {best['high']:.3f}]; the logged policy earned {found['logged']:.3f}"
    )
    low, high = found.get("scale", (0.0, 1.0))
    if (low, high) != (0.0, 1.0):
        text += f" (rewards from {low:g} to {high:g}, rescaled to 0 to 1)"
    if difference := found.get("difference"):
        text += (
            f"; {difference['value']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}] against "
            "the compared policy"
        )
    warnings = found["overlap"]["warnings"]
    return f"{text}. {'Warning: ' + '; '.join(warnings) + '.' if warnings else ''}".strip()


def evidence_text(result: dict[str, Any]) -> str:
    """Evidence that carries the judgement, of how many prompts, and why not pairs."""
    lead, evidence = result["carried_by"], result["evidence"]
    prompts = evidence.get(lead, {}).get("prompts", 0)
    if lead == PAIRS:
        pairs = evidence[PAIRS].get("pairs", prompts)
        if pairs == prompts:
            return f"Evaluated on {prompts:,} held-out pairs, each of its own prompt."
        return f"Evaluated on {pairs:,} held-out pairs of {prompts:,} prompts, each prompt with one vote."
    pairs = evidence.get(PAIRS, {}).get("prompts", 0)
    if lead == CORRECTIONS and pairs:
        return f"Judged on {prompts:,} held-out prompts to which people wrote the answer: are the policy's the same?"
    none = f"only {pairs:,} of the held-out prompts have" if pairs else "no held-out prompt has"
    return (
        f"{result['agent']}: {none} a preferred and a rejected answer, so there are "
        f"{'too few' if pairs else 'no'} pairs. Evaluated on {lead} instead, {KINDS[lead]}: {prompts:,} "
        "held-out prompts."
    )


def kind_cells(figures: dict[str, Any], compared: bool) -> list[str]:
    """The figure of a kind on either side."""
    own = figures.get("concordance") or figures.get("own")
    if figures.get("unit", "points") == "points":
        cells = [share_text(own)]
        other = figures.get("against_value")
        return [*cells, f"{100 * other:.1f} %" if other is not None else ""] if compared else cells
    cells = [f"{own['value']:.3f} [{own['low']:.3f}, {own['high']:.3f}] n={own['n']:,}"] if own else [""]
    unit = "" if figures["unit"] == UNITS[REWARDS] else f" {figures['unit']}"
    return [*cells, f"{figures['against_value']:.3f}{unit}"] if compared else cells


def knowledge_text(known: dict[str, Any]) -> str:
    """Knowledge of what people like, as one figure with its interval."""
    difference = known["log_loss_difference"]
    return (
        f"As a calibrated probability of being liked: log-loss {known['log_loss']:.3f} nats an answer (a coin 0.693), "
        f"{known['against_log_loss']:.3f} for the other; difference {difference['value']:+.3f} "
        f"[{difference['low']:+.3f}, {difference['high']:+.3f}], below 0 is better."
        if difference["low"] is not None
        else f"As a calibrated probability of being liked: log-loss {known['log_loss']:.3f} nats an answer."
    )


def verdict(result: dict[str, Any]) -> str:
    """Gain shown by the comparison, in one sentence with its figures: by the gate's interval where it has
    one."""
    comparison = result["comparison"]
    difference, gate = comparison["difference"], comparison.get("gate")
    against = comparison["against"]
    if difference is None:
        return f"No gain over {against} can be shown: all held-out answers were rated alike."
    estimate = gate or difference
    scale, unit = (100.0, "points") if comparison["unit"] == "points" else (1.0, comparison["unit"])
    form = "+.1f" if scale == 100 else "+.3f"
    value, low, high = (format(scale * estimate[part], form) for part in ("value", "low", "high"))
    confidence = gate["confidence"] if gate else 0.95
    figures = (
        f"{value} {unit} {EVIDENCE_MEASURES[comparison['kind']]} [{low}, {high}] ({100 * confidence:.1f} % interval"
        f"{', the one the gate asks about at attempt ' + str(gate['attempt']) if gate else ''}), "
        f"{'exact McNemar ' if 'b' in comparison else ''}p = {comparison['p_value']:.2g}"
    )
    if estimate["low"] > 0:
        return f"Better than {against}: {figures}."
    if estimate["high"] < 0:
        return f"WORSE than {against}: {figures}."
    return f"No gain over {against} is shown: {figures}; the interval includes zero."
