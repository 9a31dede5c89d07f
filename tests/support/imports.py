"""Import of a file in tests, in one call."""

from pathlib import Path
from typing import Any

from feedback.transfer.import_ import ImportOrder, order_import
from feedback.transfer.import_report import ImportReport


def file_import(
    path: str | Path, *, ratings_path: str | Path | None = None, dry_run: bool = False, **how: Any
) -> ImportReport:
    """Import a file. how: fields of ImportOrder, and `progress`."""
    progress = how.pop("progress", None)
    order = ImportOrder(Path(path), ratings_path=ratings_path and Path(ratings_path), **how)
    return order_import(order, dry_run=dry_run, progress=progress)
