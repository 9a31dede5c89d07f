"""Show the detected hardware, the chosen profile, and why."""

from __future__ import annotations

from dataclasses import asdict

from backend.command import CommandOptions, RatchetCommand, Result
from rl.jobs.trainer import hardware_detect
from rl.recipes import recipe_named
from rl.recipes.fit import sizes_that_fit

ANSWER_WORDS = {True: "yes", False: "no", None: "none"}


class Options(CommandOptions):
    profile: str | None = None
    """P: Show the settings of this profile: auto, cpu_only, desktop_cpu or gpu (default:
    RATCHET_PROFILE). Example: --profile cpu_only"""


class Command(RatchetCommand[Options, Result]):
    writes = False
    help = (
        "Show the detected hardware, the profile and preset chosen for it with a reason per setting, and "
        "which model sizes can be trained. Example: manage.py hardware --profile cpu_only"
    )

    def work(self, options: Options) -> Result:
        found = hardware_detect(options.profile)
        fits = sizes_that_fit(
            found.memory_gb,
            recipe_named("dpo", found.preset),
            on_accelerator=found.device != "cpu",
            supports_4bit=found.supports_4bit,
        )
        return {**found.as_dict(), "sizes": [asdict(fit) for fit in fits]}

    def next_step(self, result: Result) -> str:
        return "python manage.py train_dpo --agent SLUG --dry-run (estimates a training on this machine)"

    def show(self, result: Result) -> None:
        rows = []
        for name, value in result.items():
            if name not in ("reasons", "measured", "gpus", "sizes"):
                text = ", ".join(value) if isinstance(value, list) else ANSWER_WORDS.get(value, str(value))
                rows.append((name.replace("_", " "), text, result["reasons"].get(name, "")))
        for gpu in result["gpus"]:
            rows.append(("gpu", f"{gpu['name']}, {gpu['memory_gb']} GB", gpu["kind"]))
        for name, value in result["measured"].items():
            unit = "" if "error" in name else " GFLOP/s"
            rows.append((name.replace("_", " "), f"{value:.3g}{unit}", "matrix products, measured now"))
        for quantization, how in (("none", "as they are"), ("4bit", "in 4 bits")):
            if fits := [one for one in result["sizes"] if one["quantization"] == quantization]:
                text = ", ".join(one["size"] for one in fits if one["fits"]) or "none of 0.5B to 8B"
                need = ", ".join(f"{one['size']} {one['gb']:g}" for one in fits)
                why = f"GB at most, a pair at a time, preset {result['preset']}: {need}"
                rows.append((f"models {how}", text, why))
        self.table(rows, ("setting", "value", "why"))
