"""Alias of the client package `ratchet_client`, for apps that import it from here. The server itself never does.

Where the package is not installed, the one of this checkout is loaded, `clients/python`, without touching `sys.path`.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent / "clients" / "python" / "src" / "ratchet_client"


def _load_from_checkout() -> None:
    """Import the package from where it lies. Raises ModuleNotFoundError where this is no checkout."""
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

from ratchet_client import (  # noqa: E402
    CheckpointLoader,
    CheckpointRefused,
    CollectorStatus,
    Hook,
    Span,
    Trace,
    TraceCollector,
    hook_into_agent,
    records_decision,
    records_tool,
    redact_keys,
)

__all__ = [
    "CheckpointLoader",
    "CheckpointRefused",
    "CollectorStatus",
    "Hook",
    "Span",
    "Trace",
    "TraceCollector",
    "hook_into_agent",
    "records_decision",
    "records_tool",
    "redact_keys",
]

# An app that imports from here may have set level or handlers of the logger that had this name: they go on to hold.
logging.getLogger("ratchet_client").parent = logging.getLogger("feedback.collector")
