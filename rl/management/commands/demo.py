"""Run the whole loop once, on the bundled base model or a real one."""

from __future__ import annotations

from dataclasses import asdict

from django.core.management.base import CommandError
from pydantic import Field
from rich.panel import Panel
from rich.table import Table

from backend.command import CommandOptions, RatchetCommand, Result
from backend.installation import as_typed
from rl.export.agreement import ExportAgreement
from rl.management.demo import MINUTES, DemoStopped, demo, model_demo
from rl.management.evaluation_text import right_text, share_text, verdict
from rl.management.options import base_model_field


class Options(CommandOptions):
    model: str | None = base_model_field("--model", "A real base model", "the bundled one")
    minutes: float = Field(
        MINUTES,
        description=f"N: Time limit of the training with --model, in minutes (default {MINUTES:g}). "
        "Example: --minutes 5",
    )


class Command(RatchetCommand[Options, Result]):
    help = (
        "Run the whole loop once on the bundled base model: simulate decisions, rate them (simulated "
        "raters), train, evaluate, register, export, answer. With --model, on a real language model and a shop's "
        "triage. Example: manage.py demo"
    )

    def work(self, options: Options) -> Result:
        try:
            if options.model:
                return asdict(model_demo(options.model, self.bar, minutes=options.minutes))
            return demo(self.bar)
        except DemoStopped as stop:
            raise CommandError(str(stop)) from stop

    def show(self, result: Result) -> None:
        if "simulation" in result:
            self._show_bundled(result)
        else:
            self._show_model(result)

    def _show_model(self, result: Result) -> None:
        evaluation = result["evaluation"]
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column()
        table.add_column(overflow="fold")  # a path is not cut
        table.add_row("base model", result["model"])
        table.add_row("policy", f"[bold]{result['policy']}[/bold]")
        table.add_row("held out", right_text(evaluation))
        table.add_row("valid answers of the policy", share_text(evaluation["valid_rate"]))
        table.add_row("promoted", "yes" if result["promoted"] else f"no: {result['refusal']}")
        for one in result["answers"]:
            table.add_row(
                f"right through {one['served_as']}",
                f"{one['taught']} of {one['of']} fresh messages, {one['new']} of {one['of']} in new wordings; "
                f"{one['median_ms']:.0f} ms an answer",
            )
        for file in result["files"]:
            table.add_row(f"GGUF, {file['form']}", f"{file['path']} ({file['bytes'] / 1e6:.1f} MB)")
            if found := file["checked"].get("agreement"):
                table.add_row("", " ".join(ExportAgreement.model_validate(found).words()))
        took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["seconds"].items())
        table.add_row("took", took)
        title = "the whole loop, once; the feedback is SIMULATED"
        self.console.print(Panel(table, title=title, title_align="left", expand=False))
        self.stdout.write(verdict(evaluation))

    def _show_bundled(self, result: Result) -> None:
        simulated, training, evaluation = result["simulation"], result["training"], result["evaluation"]
        comparison, answer = evaluation["comparison"], result["answer"]
        file = result["export"]["files"][0]
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column()
        table.add_column(overflow="fold")  # a path is not cut
        table.add_row(
            "decisions",
            f"{simulated['decisions']:,} with {simulated['ratings']:,} SIMULATED ratings, 10 % of them flipped",
        )
        table.add_row("trained", f"{training['samples']['train']:,} pairs in {training['seconds']:.0f} s")
        table.add_row("preference accuracy of the base model", share_text(comparison["preference_accuracy"]))
        table.add_row(
            f"[bold]{training['policy']}[/bold]",
            f"[bold]{share_text(evaluation['preference_accuracy'])}[/bold]",
        )
        table.add_row("valid answers", share_text(evaluation["valid_rate"]))
        table.add_row("GGUF", f"{file['path']} ({file['bytes'] / 1e6:.1f} MB)")
        table.add_row("asked", answer["state"]["question"])
        liked = "the raters like it" if answer["liked"] else "the raters do not like it"
        table.add_row("answered", f"{answer['response']} in {answer['latency_ms']:.0f} ms; {liked}")
        self.console.print(Panel(table, title="the whole loop, once", title_align="left", expand=False))
        self.stdout.write(verdict(evaluation))
        serve = as_typed("make serve")
        plan = as_typed(".venv/bin/python manage.py train_dpo --dry-run")
        self.stdout.write(
            "\nNext:\n"
            f"  {serve:<46}   serves the pages and prints a sign-in link\n"
            f"  {plan:<46}   estimates a training on all ratings so far"
        )
