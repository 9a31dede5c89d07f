"""Data, training, evaluation, gate, export and deployment in one command."""

from __future__ import annotations

from dataclasses import asdict

from django.core.management.base import CommandError

from backend.command import CommandOptions, RatchetCommand, Result
from rl.management.options import base_model_field, base_model_given, knobs_assigned, verdict_lines


class Options(CommandOptions):
    agent: str | None = None
    """SLUG: Agent (default: the only one). Example: --agent widgets"""
    method: str = "auto"
    """M: dpo, kto, sft, grpo, ppo, rlhf (a reward model, then PPO), distil (SFT on the unrated answers of
    one policy, then preferences), linear, or auto (default), which chooses by the kinds of feedback and
    prints the reason. Example: --method distil"""
    model: str | None = base_model_field("--model", "Base model", "the agent's")
    reward: tuple[str, ...] | None = None
    """SPEC: Reward of grpo and ppo, repeatable; auto: the agent's reward model, trained first if there is
    none (default: the preset's). Example: --reward auto"""
    config: str | None = None
    """NAME: Preset of the recipe (default: chosen by the detected hardware). Example: --config cpu"""
    minutes: float | None = None
    """N: Time limit of the training in minutes, as in train_<method>; 0 sets no limit. Example: --minutes
    5"""
    set: tuple[str, ...] = ()
    """KNOB=VALUE: Set a knob of the recipe; repeatable. Example: --set max_steps=20"""
    deploy_ollama: bool = False
    """If it passes, create a model on the Ollama server at OLLAMA_HOST, also under the name
    OLLAMA_MODEL_FAST (else the agent's)."""
    dry_run: bool = False
    """Print the plan: each training with its reason, counts, minutes and memory; train nothing."""
    run: int | None = None
    """RUN: Skip training: evaluate, promote, export and deploy the policy of this finished run. Example:
    --run 17"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Train on an agent's feedback and evaluate the policy against the champion; if it passes the "
        "gate, promote, export and deploy it. Example: manage.py run_pipeline --agent widgets"
    )

    def work(self, options: Options) -> Result:
        # Before the slow imports below, so that a wrong name fails at once.
        base_model = base_model_given(options.model, self)
        from rl.jobs.estimates import agent_for
        from rl.models import Policy, TrainingRun
        from rl.online import pipeline

        if options.run is not None:
            with self.bar("evaluating, then gate and export") as bar:
                outcome = pipeline.run_follow(options.run, bar.update)
            run = TrainingRun.objects.get(pk=options.run)
            return {"training": {"run": run.pk, "why": run.result.get("why", "")}, **asdict(outcome)}
        whole = pipeline.TrainingPipeline(
            agent_for(options.agent, from_file=False),
            base_model=base_model,
            method=options.method,
            config=options.config,
            knobs=self.knobs_of(options),
        )
        if options.dry_run:
            with self.bar("dry run") as bar:
                plan = whole.dry_run(bar.update)
            command = self.command_line({**dict(options), "agent": whole.agent}, without=("dry_run",))
            return {"dry_run": True, "trainings": plan, "next_step": command}
        for planned in whole.plan.trainings:
            self.note(f"{planned.method}: {planned.reason}")
        with self.bar("training") as bar:
            training = whole.train(bar.update)
        if training["status"] != "succeeded":
            raise CommandError(
                f"run {training['run']} {training['stopped']}; its checkpoints are kept; resume with: "
                f"python manage.py train_{training['method']} --resume {training['run']}, then "
                f"python manage.py run_pipeline --run {training['run']}"
            )
        with self.bar("evaluating, then gate and export") as bar:
            outcome = whole.follow(training, bar.update)
        if options.deploy_ollama and outcome.passed and not outcome.deployed.startswith("ollama"):
            with self.bar("deploying") as bar:
                outcome.deployed = pipeline.policy_deploy(
                    Policy.objects.get(name=outcome.policy),
                    actor="run_pipeline",
                    to_ollama=True,
                    progress=bar.update,
                )
        return {"training": training, **asdict(outcome)}

    @staticmethod
    def knobs_of(options: Options) -> Result:
        knobs = knobs_assigned(options.set)
        if options.minutes is not None:
            knobs["minutes"] = options.minutes
        if options.reward:
            knobs["reward"] = ",".join(options.reward)
        return knobs

    def next_step(self, result: Result) -> str:
        return str(result["next_step"])

    def show(self, result: Result) -> None:
        if result.get("dry_run"):
            self._show_plan(result["trainings"])
            return
        for one in result["training"].get("candidates", ()):
            kept = ", kept" if one["kept"] else ""
            self.stdout.write(
                f"{one['policy']}: {one['share']:.0%} of {one['compared']:,} on the eval split{kept}"
            )
        if why := result["training"].get("why"):
            self.stdout.write(why)
        verdicts = result["sheet"].get("verdicts", [])
        for verdict in verdicts:
            if verdict["outcome"] == "refused":
                self.stdout.write(f"{verdict['outcome']:>14}  {verdict['rule']}: {verdict['words']}")
        met = sum(verdict["outcome"] == "passed" for verdict in verdicts)
        if verdicts:
            self.stdout.write(f"{met:>14}  other rules are met (all figures: --json)")
        for line in verdict_lines(result["why"]) if result["why"] else ():
            self.stdout.write(line)
        self.stdout.write(
            f"{result['policy']} is {result['stage']}"
            + (f": {result['reason']}" if result["reason"] else "")
            + "".join(f"\n{path}" for path in result["exported"])
            + (f"\nanswers: {result['deployed']}" if result["deployed"] else "")
        )

    def _show_plan(self, trainings: list[Result]) -> None:
        for number, one in enumerate(trainings, 1):
            samples = ", ".join(
                f"{one['samples'].get(split, 0):,} {split}" for split in ("train", "eval", "holdout")
            )
            self.stdout.write(
                f"{number}. {one['method']}: {one['reason']}\n"
                f"   {samples}; {one['estimated_steps']:,} steps, {one['estimated_minutes']:.1f} min, "
                f"{one['estimated_memory_gb']:.1f} GB" + (f"; {one['doubt']}" if one["doubt"] else "")
            )
