"""Size of the project, as `make size` prints it.

python tools/size.py            # counts alone
python tools/size.py --walks    # also trains a tiny policy and answers one chat completion, and counts their files
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("backend", "feedback", "rl", "clients", "packed")
"""Folders that are counted; migrations and tests inside them are not."""


def tracked(*folders: str) -> list[Path]:
    """Files of the checkout in these folders (all without), in the order of their names."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def product_modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the product that is not empty."""
    found = {}
    for path in tracked(*PRODUCT):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.suffix == ".py" and path.stat().st_size and not {"migrations", "tests"} & set(parts):
            found[".".join(parts).removesuffix(".__init__").removeprefix("clients.python.src.")] = path
    return found


def imported(tree: ast.AST, modules: dict[str, Path]) -> set[str]:
    """Modules of the product that a module imports anywhere, functions included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & modules.keys()


def single_importers(trees: dict[str, ast.Module], modules: dict[str, Path]) -> list[str]:
    """Modules that only one other imports, from the same folder."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for other in imported(tree, modules) - {name}:
            importers[other].add(name)
    return [
        name
        for name, found in importers.items()
        if len(found) == 1 and modules[next(iter(found))].parent == modules[name].parent
        if modules[name].name != "__init__.py"
    ]


def function_lines(trees: dict[str, ast.Module]) -> Iterator[int]:
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield (node.end_lineno or node.lineno) - node.lineno + 1


def names_any(text: str) -> int:
    """Times the type `Any` is written outside comments and strings, its imports included."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.NAME and token.string == "Any" for token in tokens)


def lines(paths: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def counts() -> dict[str, str]:
    """Measure -> its value, of what git tracks."""
    modules = product_modules()
    texts = {name: path.read_text() for name, path in modules.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    python = [path for path in tracked() if path.suffix == ".py"]
    tests = [path for path in python if "tests" in path.relative_to(ROOT).parts]
    skips = sum(path.read_text().count("# fmt: skip") for path in python if path != Path(__file__))
    return {
        "lines of the product": f"{lines(list(modules.values())):,}",
        "modules": f"{len(modules):,}",
        "modules with one importer, in its folder": f"{len(single_importers(trees, modules)):,}",
        "`Any`": f"{sum(map(names_any, texts.values())):,}",
        "`fmt: skip`": f"{skips:,}",
        "median lines of a function": f"{statistics.median(function_lines(trees)):g}",
        "lines of tests": f"{lines(tests):,}",
        "lines of benchmarks and tools": f"{lines([p for p in tracked('benchmarks', 'tools') if p.suffix == '.py']):,}",
        "pages of docs": f"{sum(path.suffix == '.md' for path in tracked('docs')):,}",
        "files of a checkout": f"{sum(path.stat().st_size for path in tracked()) / 1e6:.1f} MB",
    }


# --- Walks ------------------------------------------------------------------------------------------------------


class Walk:
    """Files of the product whose functions run, and call sites that lead back into a file seen before."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.returns: set[tuple[str, int, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or frame.f_code.co_name == "<module>" or not self._ours(file):
            return
        caller = frame.f_back
        while caller is not None and not self._ours(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename == file:
            if file not in self.files:
                self.files.append(file)
        elif file in self.files:
            self.returns.add((caller.f_code.co_filename, caller.f_lineno, file))
        else:
            self.files.append(file)

    @staticmethod
    def _ours(file: str) -> bool:
        return file.startswith(str(ROOT)) and Path(file).relative_to(ROOT).parts[0] in PRODUCT

    def of(self, act: Callable[[], object]) -> Walk:
        sys.setprofile(self)
        try:
            act()
        finally:
            sys.setprofile(None)
        return self

    def __str__(self) -> str:
        return f"{len(self.files)} files, {len(self.returns)} returns"


def walks() -> dict[str, str]:
    """One DPO training of ten pairs on the demo's model, and one chat completion with it, in this process."""
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(
            RATCHET_HOME=home,
            DATABASE_URL="",
            DJANGO_SETTINGS_MODULE="backend.settings",
            HF_HUB_OFFLINE="1",
            OMP_NUM_THREADS="1",
            LOG_LEVEL="ERROR",
        )
        sys.path.insert(0, str(ROOT))
        import django

        django.setup()
        from django.contrib.auth import get_user_model
        from django.core.management import call_command
        from django.test import Client

        from feedback.services import comparison_submit, decision_record

        call_command("migrate", verbosity=0)
        for number in range(12):
            asked = {
                "agent": "walk",
                "messages": f"{number} parcels are late. Which queue?",
                "policy": "base",
            }
            left, right = (decision_record(**asked, response=word).row for word in ("delivery", "billing"))
            comparison_submit(left=left, right=right, preference="left", rater="tool")
        training = ["--agent", "walk", "--max-steps", "2", "--batch-size", "2", "--no-color"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            trained = Walk().of(lambda: call_command("train_dpo", *training))
        body = {
            "model": "walk:base",
            "messages": [{"role": "user", "content": "a late parcel?"}],
            "max_tokens": 4,
        }
        client = Client(SERVER_NAME="localhost")
        client.force_login(get_user_model().objects.create_superuser("walker"))
        ask = partial(client.post, "/v1/chat/completions", body, content_type="application/json")
        for _ in range(60):  # the first request has the model's GGUF file written
            if (first := ask()).status_code != 503:
                break
            time.sleep(5)
        if first.status_code != 200:
            raise SystemExit(f"the gateway answered {first.status_code}: {first.content[:300]!r}")
        answered = Walk().of(ask)
        return {"a training": str(trained), "a chat completion": str(answered)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--walks", action="store_true", help="also count the files of a training and an answer"
    )
    found = counts() | (walks() if parser.parse_args().walks else {})
    for measure, value in found.items():
        print(f"{measure:<42} {value:>24}")


if __name__ == "__main__":
    main()
