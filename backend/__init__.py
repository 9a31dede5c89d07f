"""Settings, URLs and what both apps share."""

import sys
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.2.0"
"""Also read by pyproject.toml."""

# The client is a distribution of its own, whose outbox the server uses. In a checkout nobody has to install it.
if find_spec("ratchet_client") is None:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "clients" / "python" / "src"))
