"""Data, training, evaluation, gate, export, deployment: the whole way in one command."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser

from backend.command import RatchetCommand
from rl import pipeline, runs
from rl.choosing import method_chosen
from rl.jobs import TrainOrder
from rl.learner_config import learner_settings, retrain_knobs
from rl.models import Policy
from rl.orders import agent_for


class Command(RatchetCommand):
    help = (
        "Train on an agent's feedback, judge the policy against the champion, and promote, export and deploy it where "
        "it passes the gate. Example: manage.py run_pipeline --agent widgets"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--agent", metavar="SLUG", help="Whose (default: the only one). Example: --agent widgets"
        )
        parser.add_argument(
            "--method",
            default="auto",
            metavar="M",
            help="dpo, kto, sft, grpo, ppo, or auto (default): dpo, kto or sft by what the feedback holds, and says "
            "why. Example: --method dpo",
        )
        parser.add_argument(
            "--reward",
            action="append",
            metavar="SPEC",
            help="What grpo and ppo reward, repeatable (default: the preset's). Example: --reward agent",
        )
        parser.add_argument(
            "--config", metavar="NAME", help="Preset (default: by the machine). Example: --config cpu"
        )
        parser.add_argument(
            "--deploy-ollama",
            action="store_true",
            help="Make the policy a model of the Ollama server at OLLAMA_HOST when it passes, and point "
            "OLLAMA_MODEL_FAST (else the agent's name) to it.",
        )
        parser.add_argument(
            "--run",
            type=int,
            metavar="RUN",
            help="Only what follows a run that is trained. Example: --run 17",
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        if options["run"] is not None:
            with self.bar("judging") as bar:
                return asdict(pipeline.run_follow(options["run"], bar.update))
        agent = agent_for(options["agent"], from_file=False)
        chosen = method_chosen(agent, options["method"])
        wanted = learner_settings(agent)
        knobs = retrain_knobs(wanted, chosen.method)
        if options["reward"]:
            knobs["reward"] = ",".join(options["reward"])
        order = TrainOrder(
            agent,
            chosen.method,
            config=options["config"],
            actor="run_pipeline",
            why=chosen.why,
            knobs=knobs,
        )
        with self.bar("training") as bar:
            trained = runs.train(order, bar.update)
        if trained["status"] != "succeeded":
            raise CommandError(
                f"run {trained['run']} was {trained['status']}; go on with: "
                f"python manage.py train_{order.method} --resume {trained['run']}"
            )
        wishes = pipeline.Wishes.of(wanted)
        policy = Policy.objects.get(name=trained["policy"])
        with self.bar("judging") as bar:
            outcome = pipeline.policy_follow(policy, wishes, bar.update)
        if options["deploy_ollama"] and outcome.passed and not outcome.deployed.startswith("ollama"):
            with self.bar("deploying") as bar:
                outcome.deployed = pipeline.policy_deploy(
                    policy, actor="run_pipeline", to_ollama=True, progress=bar.update
                )
        return {"training": trained, **asdict(outcome)}

    def show(self, result: dict[str, Any]) -> None:
        if why := result["training"]["why"]:
            self.stdout.write(why)
        for verdict in result["sheet"].get("verdicts", []):
            self.stdout.write(f"{verdict['outcome']:>14}  {verdict['rule']}: {verdict['words']}")
        self.stdout.write(
            f"{result['policy']} is {result['stage']}"
            + (f": {result['reason']}" if result["reason"] else "")
            + "".join(f"\n{path}" for path in result["exported"])
            + (f"\nanswers: {result['deployed']}" if result["deployed"] else "")
        )
