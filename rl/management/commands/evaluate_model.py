"""Evaluate a policy on held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from backend.command import CommandOptions, RatchetCommand, Result
from backend.installation import file_replace
from rl.datasets.prompt_clusters import cluster_text
from rl.evaluation.service import EvaluationOrder, evaluate
from rl.gates.evidence_kinds import PAIRS
from rl.gates.headlines import (
    TITLES,
    baseline_text,
    coverage_text,
    fields_text,
    liked_of,
    right_answer_figure,
)
from rl.gates.report import GeneralAnswers
from rl.management.evaluation_text import (
    LIKED_UNKNOWN,
    MEASURES,
    evidence_text,
    kind_cells,
    look_text,
    next_after_evaluation,
    off_policy_text,
    quantised_text,
    right_text,
    share_text,
    verdict,
)
from rl.management.options import base_model_field, base_model_given, verdict_lines
from rl.models import Policy
from rl.registry import gate_evidence
from rl.registry.checklist import VerdictShown, policy_verdict


class Options(CommandOptions):
    policy: str | None = None
    """NAME: A registered policy. Example: --policy widgets-v312"""
    checkpoint: Path | None = None
    """DIR: An adapter folder, in place of --policy. Example: --checkpoint var/runs/17/checkpoint-50"""
    base_model: str | None = base_model_field(
        "--base-model", "Base model of the adapter", "the one it was trained on"
    )
    agent: str | None = None
    """SLUG: Agent whose held-out feedback is used (default: the policy's). Example: --agent filer"""
    test_data: Path | None = None
    """F: A file of feedback in any known format, in place of the held-out prompts. Example: --test-data
    test.jsonl"""
    compare_base: bool = False
    """Compare with the base model on the same prompts."""
    compare: str | None = None
    """POLICY: Compare on the same prompts: `incumbent` (who answers users today: the champion, at first
    the app's own model by its recorded answers), `base` (as --compare-base), or a policy's name. Example:
    --compare incumbent"""
    no_quantization: bool = False
    """Load the base model in full precision (the default of this command)."""
    quantization: Literal["none", "4bit", "gguf"] = "none"
    """Load the base model in 4-bit, or also answer the same prompts with llama.cpp on the base's GGUF
    file (default none). Example: --quantization gguf"""
    max_samples: int | None = None
    """N: Use at most N rows of each kind of evidence (default: all). Example: --max-samples 200"""
    reward: tuple[str, ...] = ()
    """SPEC: Reward function or reward model that scores generated answers to held-out prompts, as for
    train_grpo; repeatable. Example: --reward model:assistant-rm-v120"""
    output: Path | None = None
    """F: Also write the JSON result to this file. Example: --output results.json"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Evaluate a policy on held-out prompts: preference accuracy, valid answers and rewards, alone or "
        "against another policy. Example: manage.py evaluate_model --policy widgets-v312 --compare-base"
    )

    def work(self, options: Options) -> Result:
        base_model = base_model_given(options.base_model, self)
        order = EvaluationOrder(
            policy=options.policy,
            checkpoint=options.checkpoint,
            agent=options.agent,
            test_data=options.test_data,
            compare_base=options.compare_base,
            compare=options.compare,
            base_model=base_model,
            quantization="none" if options.no_quantization else options.quantization,
            max_samples=options.max_samples,
            rewards=",".join(options.reward),
        )
        with self.bar("evaluating") as bar:
            result = evaluate(order, bar.update)
        result["why"] = None if options.test_data else self.why(result)
        if options.output:
            text = json.dumps(result, indent=2, ensure_ascii=False, default=str) + "\n"
            file_replace(options.output, text)
        return result

    @staticmethod
    def why(result: Result) -> Result | None:
        """The policy's verdict, if this is the comparison that its gate needs."""
        policy = Policy.objects.filter(name=result["policy"]).first()
        comparison = result.get("comparison")
        if policy is None or comparison is None:
            return None
        if comparison["against"] != gate_evidence.rival_name(policy):
            return None
        return VerdictShown.of(policy_verdict(policy))

    def show(self, result: Result) -> None:
        comparison, why = result.get("comparison"), result["why"]
        for line in verdict_lines(why) if why else ():
            self.stdout.write(line)
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
        self.table(*_figures(result, liked))
        if quantised := result.get("quantised"):
            self.stdout.write(quantised_text(quantised))
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
        if words := coverage_text(result):
            self.stdout.write(words)
        if words := baseline_text(result):
            self.stdout.write(words)
        self.stdout.write(off_policy_text(result["off_policy"]))
        if result["seen_in_training"]:
            self.stdout.write(
                f"{result['seen_in_training']:,} rows left out: the policy was trained on their prompts."
            )

    def next_step(self, result: Result) -> str:
        return next_after_evaluation(result)


def _figures(result: Result, liked: Result | None) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Rows and columns of the table of figures."""
    comparison = result.get("comparison")
    sides = [result, *([comparison] if comparison else [])]
    rows: list[tuple[str, ...]] = []
    if liked is not None:
        rows.append(
            ("liked answers", *(share_text(one) for one in [liked, liked.get("against")][: len(sides)]))
        )
    for kind, figures in result["evidence"].items():
        if kind != PAIRS:
            rows.append((TITLES[kind].lower(), *kind_cells(figures, bool(comparison))))
    for key, label in MEASURES.items():
        if any(cells := [share_text(side.get(key)) for side in sides]):
            rows.append((label, *cells))
        if any(cells := [share_text((side.get("written") or {}).get(key)) for side in sides]):
            rows.append(("... as free text", *cells))
    columns = ("held out", result["policy"], *([comparison["against"]] if comparison else []))
    return rows, columns
