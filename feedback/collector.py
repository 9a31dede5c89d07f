"""Alias of the client package `ratchet_client`."""

import backend  # noqa: F401  # finds the package in a checkout
from ratchet_client import *  # noqa: F403
from ratchet_client import __all__ as __all__
