"""A dataset in a file of one's own: JSON lines, JSON, or a folder that Hugging Face `datasets` opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rl.datasets.builder import PreparedDataset
from rl.datasets.feedback_types import SPLITS
from rl.datasets.snapshots import DatasetRefused
from rl.recipes.base import curriculum_order

FORMATS = ("jsonl", "json", "datasets")


def dataset_write(
    prepared: PreparedDataset, path: Path, file_format: str, *, order: str = "none"
) -> list[Path]:
    """Write the rows of a dataset and return the files: one a split and line (`jsonl`), one object with a list a split
    (`json`), or a DatasetDict (`datasets`).

    The training rows stand in the order that a curriculum gives them. Raises DatasetRefused for a folder that is there
    already, or a file that cannot be written.
    """
    if file_format not in FORMATS:
        raise DatasetRefused(f"a dataset is written as {', '.join(FORMATS)}; found {file_format!r}")
    rows: dict[str, list[dict[str, Any]]] = {
        split: [_with_reward(row) for row in prepared.rows(split)] for split in SPLITS
    }
    try:
        rows["train"] = [rows["train"][i] for i in curriculum_order(rows["train"], order)]
    except ValueError as error:
        raise DatasetRefused(str(error)) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if file_format == "datasets":
            return _folder(path, rows)
        if file_format == "json":
            return [_file(path, json.dumps(rows, ensure_ascii=False, indent=1) + "\n")]
        lines = (json.dumps(row, ensure_ascii=False) for split in SPLITS for row in rows[split])
        return [_file(path, "".join(f"{line}\n" for line in lines))]
    except OSError as error:
        raise DatasetRefused(f"the dataset cannot be written to {path}: {error.strerror or error}") from error


def _with_reward(row: dict[str, Any]) -> dict[str, Any]:
    """The row with `reward`, in [0, 1], where it has one response and what that was worth is known: its score, or 1
    and 0 of a good and a bad one. Groups have `rewards`, one for each response."""
    if "score" in row:
        return {**row, "reward": float(row["score"])}
    return {**row, "reward": float(row["label"])} if "label" in row else row


def _file(path: Path, text: str) -> Path:
    half = path.with_name(f".{path.name}.half")
    half.write_text(text, "utf-8")
    half.replace(path)
    return path


def _folder(path: Path, rows: dict[str, list[dict[str, Any]]]) -> list[Path]:
    from datasets import Dataset, DatasetDict

    if path.exists():
        raise DatasetRefused(f"{path} is there already: give another folder, or remove it")
    # what an agent knew has another shape in each row; a column has one
    plain = {
        split: [{**row, "state": json.dumps(row["state"], ensure_ascii=False)} for row in part]
        for split, part in rows.items()
        if part
    }
    half = path.with_name(f".{path.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    DatasetDict({split: Dataset.from_list(part) for split, part in plain.items()}).save_to_disk(str(half))
    half.replace(path)
    return sorted(file for file in path.rglob("*") if file.is_file())
