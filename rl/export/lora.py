"""Export of a policy as its adapter: the folder PEFT loads, with tokenizer and README."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rl.bundled_models import BUNDLED, added_folder
from rl.export.artifact import (
    ExportedFile,
    ExportRefused,
    ExportResult,
    Progress,
    exported_file,
    manifest_write,
    sha256_file,
    silent,
    staged_folder,
)
from rl.export.source import Source, source_open
from rl.export.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rl.training.loading import FACTS

_README = """{card}

## How to load it

A LoRA adapter (PEFT) of rank {rank}, alpha {alpha}, {tensors} tensors. It changes the answers of one base model,
`{base}`, and is of no use without it.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

{bundled}folder = "."  # where this file lies
base = AutoModelForCausalLM.from_pretrained({load}, dtype="auto", use_safetensors=True)
model = PeftModel.from_pretrained(base, folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```

The SHA-256 of each file stands in `export.json`.
"""

CARD, CARD_TAG = "README.md", "preference-learning"
"""Model card beside an adapter, and the tag that tells ours from PEFT's template."""

_BUNDLED_IMPORT = "from rl.bundled_models import resolve_base_model  # the model that comes with Ratchet\n\n"


def export_lora(
    base_model: str | None, adapter: Path, output: Path, *, progress: Progress | None = None
) -> ExportResult:
    """Copies an adapter into its own folder with tokenizer and README; hashes of the copies are verified.

    base_model: as in `export_merged`; the adapter must fit it. output: a new or empty folder, or an earlier export to
    replace. Raises ExportRefused and leaves nothing behind.
    """
    progress = progress or silent
    source = source_open(base_model, adapter)
    assert source.adapter is not None
    origin = source.adapter.path
    wanted = [origin / ADAPTER_CONFIG, origin / ADAPTER_WEIGHTS]
    if (origin / FACTS).is_file():
        wanted.append(origin / FACTS)
    with staged_folder(output, sum(file.stat().st_size for file in wanted)) as folder:
        for number, file in enumerate(wanted):
            shutil.copyfile(file, folder / file.name)
            if sha256_file(folder / file.name) != sha256_file(file):
                raise ExportRefused(
                    f"expected a copy equal to {file}, found another hash; the disk or the file changed"
                )
            progress("copying", number + 1, len(wanted))
        source.copy_tokenizer(folder)
        checked = _check(source, folder)
        (folder / "README.md").write_text(_readme(source, checked), "utf-8")
        files = [exported_file(path) for path in sorted(folder.rglob("*")) if path.is_file()]
        manifest_write(folder, ExportResult("lora", files, checked))
        files.append(exported_file(folder / "export.json"))
    return ExportResult(
        "lora",
        [ExportedFile(output / file.path.relative_to(folder), file.bytes, file.sha256) for file in files],
        checked,
    )


def _check(source: Source, folder: Path) -> dict[str, Any]:
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt", device="cpu") as tensors:
        count = len(list(tensors.keys()))
    # source_open has already matched each of them to a tensor of the base
    return {"tensors": count, "hashes_equal": True, "fits_base": source.base_name}


def _readme(source: Source, checked: dict[str, Any]) -> str:
    assert source.adapter is not None
    config = source.adapter.config
    card = source.adapter.path / CARD
    text = card.read_text("utf-8") if card.is_file() else ""
    ours = source.base_name == BUNDLED or added_folder(source.base_name) is not None
    return _README.format(
        # our card has the training data and the evaluation; PEFT's template has neither
        card=text.rstrip() if CARD_TAG in text else f"# {source.name}",
        base=source.base_name,
        load=f'resolve_base_model("{source.base_name}")' if ours else repr(source.base_name),
        rank=config.get("r"),
        alpha=config.get("lora_alpha"),
        tensors=checked["tensors"],
        bundled=_BUNDLED_IMPORT if ours else "",
    )
