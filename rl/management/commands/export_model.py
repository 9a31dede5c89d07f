"""Write a policy in the form another program reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import CommandParser

from backend import next_steps
from backend.command import RatchetCommand
from rl.export.exporters import EXPORTERS
from rl.export.service import QUANTIZATIONS, ExportOrder, ExportOrderRefused, export, ollama_register
from rl.management.base_model_option import base_model_given


class Command(RatchetCommand):
    help = (
        "Export a policy as a merged model, an adapter, ONNX or GGUF, checked against the original. "
        "Example: manage.py export_model --policy widgets-v312 --format gguf --quantization q4_k_m"
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
            "--format",
            choices=list(EXPORTERS),
            default="",
            help="Format (default: merged; gguf with --quantization or --register; linear for a linear "
            "policy): " + "; ".join(f"{name}: {exporter.title}" for name, exporter in EXPORTERS.items()),
        )
        add(
            "--merge",
            action="store_const",
            const="merged",
            dest="format",
            help="The same as --format merged.",
        )
        add(
            "--quantization",
            choices=QUANTIZATIONS,
            help="Quantisation of a GGUF file (default q4_k_m). Example: --quantization q8_0",
        )
        add(
            "--output",
            type=Path,
            help="File (gguf) or folder to write (default: RATCHET_HOME/exports/<policy>/). Example: "
            "--output model.gguf",
        )
        add(
            "--model-name",
            metavar="NAME",
            help="Model name in the file's metadata (default: the policy's). Example: --model-name widgets",
        )
        add(
            "--base-model",
            metavar="NAME_OR_PATH",
            help="Base model of the adapter: a folder, a Hugging Face name, a GGUF file, ollama:NAME, package:NAME or "
            "smollm2 (default: the one it was trained on). Example: --base-model smollm2",
        )
        add(
            "--system-prompt",
            metavar="TEXT",
            help="System prompt to store in a GGUF file (default: none). Example: --system-prompt 'Answer "
            "briefly'",
        )

        add(
            "--register",
            action="store_true",
            help="Also create a model from the GGUF file on the Ollama server at OLLAMA_HOST.",
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        base_model = base_model_given(options["base_model"], self)
        if not options["format"] and (options["register"] or options["quantization"]):
            options["format"] = "gguf"  # the one format these are said of
        if options["register"] and options["format"] != "gguf":
            raise ExportOrderRefused(
                f"--register needs --format gguf, which Ollama runs; found {options['format']}"
            )
        order = ExportOrder(
            policy=options["policy"],
            checkpoint=options["checkpoint"],
            format=options["format"],
            quantization=options["quantization"] or "q4_k_m",
            output=options["output"],
            model_name=options["model_name"],
            base_model=base_model,
            system_prompt=options["system_prompt"],
        )
        with self.bar("exporting") as bar:
            result = export(order, bar.update)
        if options["register"]:
            file = Path(result["files"][0]["path"])
            name = options["model_name"] or result["policy"] or file.stem.lower()
            with self.bar("registering") as bar:
                result["ollama"] = ollama_register(
                    file, name, system=options["system_prompt"], progress=bar.update
                )
        return result

    def show(self, result: dict[str, Any]) -> None:
        for file in result["files"]:
            self.stdout.write(f"{file['path']}  {file['bytes'] / 1e6:,.1f} MB  sha256 {file['sha256'][:16]}")
        for line in _comparison(result["checked"]):
            self.stdout.write(line)
        for note in result["notes"]:
            self.stdout.write(f"note: {note}")
        if made := result.get("ollama"):
            self.stdout.write(f"ollama: {made['name']} at {made['host']}; try: ollama run {made['name']}")
            for note in made["notes"]:
                self.stdout.write(f"note: {note}")

    def next_step(self, result: dict[str, Any]) -> str:
        if made := result.get("ollama"):
            return f"ollama run {made['name']}"
        return next_steps.after_export(result["format"], result["files"][0]["path"])


CLOSE = 0.98
"""Share of equal likeliest tokens from which a file is said to stay close to the original."""


def _comparison(checked: dict[str, Any]) -> list[str]:
    """Differences of the file from the original, in sentences with units."""
    lines = []
    if (same := checked.get("top1_agreement")) is not None:
        places = f" of {checked['positions']:,} positions" if "positions" in checked else ""
        nats = checked.get("logprob_mean_abs_diff")
        off = f"; log-probabilities differ by {nats:.3g} nats on average" if nats is not None else ""
        lines.append(
            f"compared with the original model: the same most likely token at {100 * same:.1f} %{places}{off}"
        )
        if same < CLOSE:
            lines.append(
                f"Answers may differ from the original's: at {100 * (1 - same):.1f} % of positions "
                "another token is most likely. A higher-precision --quantization (q8_0, f16) stays "
                "closer."
            )
    shown = {"top1_agreement", "logprob_mean_abs_diff", "positions"} if lines else set()
    rest = ", ".join(
        f"{name.replace('_', ' ')} {f'{value:.3g}' if isinstance(value, float) else value}"
        for name, value in checked.items()
        if name not in shown and not isinstance(value, dict)
    )
    return [*lines, f"checked: {rest}"] if rest else lines
