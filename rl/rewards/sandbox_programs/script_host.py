"""The process that runs a model's code as a program: standard input in, standard output out."""

from __future__ import annotations

import os
import sys
import types
from typing import Any


def run(program: dict[str, Any], source: int, target: int) -> None:
    os.dup2(source, 0)
    os.dup2(target, 1)
    os.close(source)
    os.close(target)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["main.py"]
    try:
        exec(compile(program["code"], "main.py", "exec"), vars(module))  # noqa: S102
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
