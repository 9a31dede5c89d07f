"""Alias of the client package `ratchet_client`. The server itself never imports it.

Without an installed package, it loads `clients/python` of this checkout, leaving `sys.path` unchanged.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent / "clients" / "python" / "src" / "ratchet_client"


def _load_from_checkout() -> None:
    spec = importlib.util.spec_from_file_location(
        "ratchet_client", CHECKOUT / "__init__.py", submodule_search_locations=[str(CHECKOUT)]
    )
    if spec is None or spec.loader is None or not CHECKOUT.is_dir():
        raise ModuleNotFoundError(
            f"expected the package ratchet-client, found it neither installed nor at {CHECKOUT}: "
            "pip install the folder clients/python of Ratchet, or the wheel made of it",
            name="ratchet_client",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules["ratchet_client"] = module
    spec.loader.exec_module(module)


if "ratchet_client" not in sys.modules and importlib.util.find_spec("ratchet_client") is None:
    _load_from_checkout()

from ratchet_client import *  # noqa: E402, F403
from ratchet_client import __all__ as __all__  # noqa: E402
