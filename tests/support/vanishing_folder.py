"""A folder that is removed by another process just before its entries are read."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest


def vanishes_when_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove `folder` at the moment somebody lists it: it was seen in its parent, and is gone now."""

    def removed_first(real: Any) -> Any:
        def listed(path: Any = ".") -> Any:
            # rmtree lists by descriptor, which is no path, and is not sent round here again
            if isinstance(path, str | os.PathLike) and Path(path) == folder:
                shutil.rmtree(folder, ignore_errors=True)
            return real(path)

        return listed

    monkeypatch.setattr(os, "scandir", removed_first(os.scandir))
    monkeypatch.setattr(os, "listdir", removed_first(os.listdir))
