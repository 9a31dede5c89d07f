"""The newcomer's way with an agent of their own, timed: `shell` by the README's commands, `pages` by mouse in Chromium.

The agent is a plant nursery's. Its raters want soaking where the soil is dry under a sunny forecast, nothing where it
is wet; its own model, a server that `pages` connects as an upstream, answers by chance. Each way begins with an empty
data folder and ends with the new champion's answer. Prints seconds per step as JSON; `shell` also the longest silence
of each command. `pages --pictures FOLDER` takes a picture of each step, wide and narrow, light and dark; `strip` makes
the pictures of the docs from them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.nursery.agent import data_lines  # noqa: E402
from benchmarks.nursery.pages import pages  # noqa: E402
from benchmarks.nursery.shell import shell  # noqa: E402
from benchmarks.nursery.strip import strip  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "way",
        choices=("shell", "pages", "strip", "data"),
        help="data prints the lines that are brought",
    )
    parser.add_argument(
        "--home", type=Path, help="An empty data folder (default: a new one that is removed)."
    )
    parser.add_argument("--pictures", type=Path, help="Folder of the pictures that `pages` takes.")
    parser.add_argument(
        "--answers", type=int, default=10, help="Answers that `pages` records and rates (default: 10)."
    )
    parser.add_argument(
        "--judging", action="store_true", help="`pages` judges a round side by side before it promotes."
    )
    parser.add_argument("--chromium", default=shutil.which("chromium") or "/usr/bin/chromium")
    options = parser.parse_args()
    if options.way == "data":
        sys.stdout.write(data_lines())
        return
    with tempfile.TemporaryDirectory() as new:
        home = options.home or Path(new)
        home.mkdir(parents=True, exist_ok=True)
        found: Any
        if options.way == "shell":
            found = shell(home)
        elif options.way == "strip":
            found = strip(options.pictures, options.chromium)
        else:
            found = pages(home, options.pictures, options.chromium, options.answers, judging=options.judging)
        sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
