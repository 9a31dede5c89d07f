"""Benchmark tasks as files: an lm-evaluation-harness configuration (YAML) beside its items (JSONL). Pure.

A task folder is data. Anything that would run code from it or fetch something is refused before the harness sees it:
`!function` tags, `class`, `include`, metrics of the hub. The harness's own metrics or one of `SCORERS` score answers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "bundled_tasks"

BUNDLED, INSTALLED, HUB = "bundled", "installed", "hub"
"""Sources of a task besides a folder's path: this project, a plugin's package, the hub."""

BENCHMARKS: dict[str, Path] = {}
"""Name -> folder of plugins' tasks."""

SCORERS = {
    "listed_option": "listed: 1 where the answer is a JSON object of one key whose value is one of the item's options",
    "code_execution": "passed: share of tests that the code passes, in the sandbox (docs/reward-reference.md)",
}
"""Value of `process_results` -> its metric and meaning."""

REFUSED_KEYS = {
    "class": "it names Python code",
    "include": "the folder holds one whole configuration",
    "custom_dataset": "it names Python code",
    "process_docs": "it names Python code",
    "unsafe_code": "code is run by `process_results: code_execution`, in the sandbox",
    "use_prompt": "it fetches a prompt",
}
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")
GENERATE, CHOICE = "generate_until", "multiple_choice"
OUTPUT_TYPES = (GENERATE, CHOICE, "loglikelihood")


class TaskRefused(ValueError):
    """A task that cannot be read or is not run; the message says what was expected, found, and what to do."""


@dataclass(frozen=True)
class TaskFolder:
    """One benchmark task, read from its folder."""

    name: str
    source: str
    """`bundled`, `installed`, or the folder's path."""
    config: Mapping[str, Any] = field(repr=False)
    """The harness's configuration without the location of its items."""
    items: Mapping[str, list[dict[str, object]]] = field(repr=False)
    """Split -> its items."""
    sha256: str
    """Hash of the configuration and all files of items."""

    @property
    def version(self) -> str:
        return str((self.config.get("metadata") or {}).get("version", ""))

    @property
    def runs_code(self) -> bool:
        return bool(self.config.get("process_results") == "code_execution")


def bundled_names() -> list[str]:
    return sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/task.yaml"))


def task_names() -> list[str]:
    """Names of tasks that need no path: bundled ones, then plugins'."""
    return [*bundled_names(), *BENCHMARKS]


def benchmark_register(name: str, found: object) -> None:
    """Registers a plugin's task folder (`backend.plugins`) by the name in its configuration; its items are read when it
    runs. Raises ValueError if it is none, or its name is taken."""
    if not isinstance(found, (str, Path)):
        raise ValueError(f"expected the path of a task folder (docs/figures.md), found {found!r:.80}")
    folder = Path(found).resolve()
    if not folder.is_dir():
        raise ValueError(f"expected a task folder at {folder}, found none")
    file = _configuration_file(folder)
    task = str(_configuration(file, file.read_bytes())["task"])
    if task in bundled_names() or BENCHMARKS.get(task, folder) != folder:
        raise ValueError(f"the name {task!r} is taken by another benchmark: choose another `task` in {file}")
    BENCHMARKS[task] = folder


def task_folder(spec: str) -> TaskFolder | None:
    """The task of a name (bundled or a plugin's) or a path (a folder with one YAML file, or that file); None for other
    names, which the harness may know. Raises TaskRefused."""
    if spec in bundled_names():
        return _read(BUNDLED_FOLDER / spec / "task.yaml", BUNDLED)
    if spec in BENCHMARKS:
        return _read(_configuration_file(BENCHMARKS[spec]), INSTALLED)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _read(_configuration_file(path), str(path.resolve()))
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return _read(path, str(path.resolve()))
    if "/" in spec or path.suffix in (".yaml", ".yml"):
        raise TaskRefused(f"expected a task folder or YAML file at {path}, found none")
    return None


def _configuration_file(folder: Path) -> Path:
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    if len(files) != 1:
        raise TaskRefused(
            f"expected one YAML file in the task folder {folder}, found {', '.join(f.name for f in files) or 'none'}"
            "; docs/figures.md shows one"
        )
    return files[0]


def _configuration(file: Path, text: bytes) -> dict[str, object]:
    """A task's configuration: an object with a name."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        what = " ".join(str(error).split())
        hint = (
            "; `!function` names Python code, and none is run from a task folder: use the harness's own metrics or "
            f"process_results with one of {', '.join(SCORERS)}"
            if "!function" in what
            else ""
        )
        raise TaskRefused(f"{file} cannot be read: {what}{hint}") from error
    if not isinstance(config, dict) or not NAME.match(str(config.get("task", ""))):
        raise TaskRefused(f"{file}: expected an object with `task`, a name of letters, digits, _ . and -")
    return config


def _read(file: Path, source: str) -> TaskFolder:
    text = file.read_bytes()
    config = _configuration(file, text)
    for key, why in REFUSED_KEYS.items():
        if config.get(key) not in (None, False):
            raise TaskRefused(f"{file}: `{key}` is not read here: {why}")
    if config.get("output_type", GENERATE) not in OUTPUT_TYPES:
        raise TaskRefused(
            f"{file}: output_type must be one of {', '.join(OUTPUT_TYPES)}; found {config['output_type']!r}"
        )
    scorer = config.get("process_results")
    if scorer is not None and scorer not in SCORERS:
        raise TaskRefused(f"{file}: process_results must be one of {', '.join(SCORERS)}; found {scorer!r}")
    metrics = config.get("metric_list")
    if not isinstance(metrics, list) or not metrics or not all(isinstance(m, dict) for m in metrics):
        raise TaskRefused(f"{file}: expected `metric_list` with at least one metric; the first one counts")
    if any(metric.get("hf_evaluate") for metric in metrics):
        raise TaskRefused(f"{file}: metrics of the hub (`hf_evaluate`) are code that is fetched; none is run")
    paths = _item_files(config, file)
    digest = hashlib.sha256(text)
    items = {}
    for split, path in paths.items():
        digest.update(f"\n{split}\n".encode() + path.read_bytes())
        items[split] = _rows(path)
    for part in ("test_split", "validation_split", "training_split", "fewshot_split"):
        if config.get(part) is not None and config[part] not in items:
            raise TaskRefused(f"{file}: `{part}` is {config[part]!r}, and data_files has {', '.join(items)}")
    if not items.get(str(config.get("test_split") or config.get("validation_split"))):
        raise TaskRefused(f"{file}: expected `test_split`, the name of a split in data_files that has items")
    kept = {key: value for key, value in config.items() if key not in ("dataset_path", "dataset_kwargs")}
    return TaskFolder(str(config["task"]), source, kept, items, digest.hexdigest())


def _item_files(config: Mapping[str, Any], file: Path) -> dict[str, Path]:
    """Split -> its file, beside the YAML."""
    files = (config.get("dataset_kwargs") or {}).get("data_files")
    if config.get("dataset_path") != "json" or not files:
        raise TaskRefused(
            f"{file}: expected `dataset_path: json` and `dataset_kwargs: {{data_files: {{test: items.jsonl}}}}`; a "
            "task whose data lie on the hub is named as the harness names it, not by a file"
        )
    named = {"test": files} if isinstance(files, str) else dict(files)
    found = {}
    for split, name in named.items():
        path = (file.parent / str(name)).resolve()
        if not path.is_relative_to(file.parent.resolve()) or not path.is_file():
            raise TaskRefused(f"{file}: expected the items of {split} in a file beside it, found no {name}")
        found[str(split)] = path
    return found


def _rows(path: Path) -> list[dict[str, object]]:
    rows = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TaskRefused(f"{path}, line {number}: no JSON ({error})") from error
        if not isinstance(row, dict):
            raise TaskRefused(f"{path}, line {number}: expected an object, found {type(row).__name__}")
        rows.append(row)
    return rows


def listed_option(answer: str, options: list[str]) -> bool:
    """True if an answer is a JSON object with one key whose value is one of the options."""
    try:
        found = json.loads(answer)
    except ValueError:
        return False
    return isinstance(found, dict) and len(found) == 1 and next(iter(found.values())) in options
