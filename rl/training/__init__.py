"""Training and evaluation of models: torch, no Django."""

import sys
from importlib.util import find_spec
from pathlib import Path

# a distribution of its own: in a checkout nobody has to install it
if find_spec("packed_forward") is None:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "packed" / "src"))
