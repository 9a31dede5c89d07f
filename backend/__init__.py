"""Settings, addresses and what both apps share."""

VERSION = "0.2.0"
"""Version of this code; pyproject.toml reads it from here."""
