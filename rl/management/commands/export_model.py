"""Export a policy for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from django.core.management.base import CommandParser

from backend import command
from backend.command import BY_HAND, CommandOptions, RatchetCommand, Result
from rl.export.agreement import ExportAgreement
from rl.export.artifact import EXPORTERS
from rl.export.service import QUANTIZATIONS, ExportOrder, ExportOrderRefused, export, ollama_register
from rl.management.options import base_model_field, base_model_given
from rl.serving.files import AUTO


class Options(CommandOptions):
    format: Annotated[str, BY_HAND]
    register_ollama: Annotated[bool, BY_HAND]
    policy: str | None = None
    """NAME: A registered policy. Example: --policy widgets-v312"""
    checkpoint: Path | None = None
    """DIR: An adapter folder, in place of --policy. Example: --checkpoint var/runs/17/checkpoint-50"""
    base_model: str | None = base_model_field(
        "--base-model", "Base model of the adapter", "the one it was trained on"
    )
    quantization: Annotated[str | None, (*QUANTIZATIONS, AUTO)] = None
    """Quantisation of a GGUF file (default q4_k_m); auto, of a base model alone: the one it is served in.
    Example: --quantization q8_0"""
    output: Path | None = None
    """File (gguf) or folder to write (default: RATCHET_HOME/exports/<policy>/). Example: --output
    model.gguf"""
    model_name: str | None = None
    """NAME: Model name in the file's metadata (default: the policy's). Example: --model-name widgets"""
    system_prompt: str | None = None
    """TEXT: System prompt to store in a GGUF file (default: none). Example: --system-prompt 'Answer
    briefly'"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Export a policy as a merged model, an adapter, ONNX or GGUF, checked against the original. "
        "Example: manage.py export_model --policy widgets-v312 --format gguf --quantization q4_k_m"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--format",
            choices=list(EXPORTERS),
            default="",
            help="Format (default: merged; gguf with --quantization or --register; linear for a linear "
            "policy): " + "; ".join(f"{name}: {exporter.title}" for name, exporter in EXPORTERS.items()),
        )
        add = parser.add_argument
        add(
            "--merge",
            action="store_const",
            const="merged",
            dest="format",
            help="The same as --format merged.",
        )
        add(
            "--register",
            dest="register_ollama",
            action="store_true",
            help="Also create a model from the GGUF file on the Ollama server at OLLAMA_HOST.",
        )

    def work(self, options: Options) -> Result:
        base_model = base_model_given(options.base_model, self)
        if not options.format and (options.register_ollama or options.quantization):
            options.format = "gguf"  # Both options apply to GGUF alone.
        if options.register_ollama and options.format != "gguf":
            raise ExportOrderRefused(
                f"--register needs --format gguf, which Ollama runs; found {options.format}"
            )
        order = ExportOrder(
            policy=options.policy,
            checkpoint=options.checkpoint,
            format=options.format,
            quantization=options.quantization or "q4_k_m",
            output=options.output,
            model_name=options.model_name,
            base_model=base_model,
            system_prompt=options.system_prompt,
        )
        with self.bar("exporting") as bar:
            result = export(order, bar.update)
        if options.register_ollama:
            file = Path(result["files"][0]["path"])
            name = options.model_name or result["policy"] or file.stem.lower()
            with self.bar("registering") as bar:
                result["ollama"] = ollama_register(
                    file, name, system=options.system_prompt, progress=bar.update
                )
        return result

    def show(self, result: Result) -> None:
        for file in result["files"]:
            self.stdout.write(f"{file['path']}  {file['bytes'] / 1e6:,.1f} MB  sha256 {file['sha256'][:16]}")
        for line in _comparison(result["checked"], result["quantization"]):
            self.stdout.write(line)
        for note in result["notes"]:
            self.stdout.write(f"note: {note}")
        if made := result.get("ollama"):
            self.stdout.write(f"ollama: {made['name']} at {made['host']}; try: ollama run {made['name']}")
            for note in made["notes"]:
                self.stdout.write(f"note: {note}")

    def next_step(self, result: Result) -> str:
        if made := result.get("ollama"):
            return f"ollama run {made['name']}"
        base = result["checked"].get("base_file", {}).get("path", "BASE.gguf")
        return command.after_export(result["format"], result["files"][0]["path"], base)


def _comparison(checked: Result, quantization: str | None) -> list[str]:
    """Agreement with the original in sentences, then the other results of the check."""
    lines = []
    if "agreement" in checked:
        agreement = ExportAgreement.model_validate(checked["agreement"])
        lines = agreement.words()
        if agreement.verdict == "changed" and (better := CLOSER.get(quantization or "")):
            lines.append(f"--quantization {better} stays closer.")
    rest = ", ".join(
        f"{name.replace('_', ' ')} {f'{value:.3g}' if isinstance(value, float) else value}"
        for name, value in checked.items()
        if not isinstance(value, dict)
    )
    return [*lines, f"checked: {rest}"] if rest else lines


CLOSER = {
    **dict.fromkeys(("q2_k", "q3_k_s", "q3_k_m", "q3_k_l"), "q4_k_m"),
    **dict.fromkeys(("q4_0", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"), "q8_0"),
    "q8_0": "f16",
}
"""Quantization -> one that is closer to the original."""
