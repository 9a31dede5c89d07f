"""Settings, URLs and what both apps share."""

VERSION = "0.2.0"
"""Also read by pyproject.toml."""
