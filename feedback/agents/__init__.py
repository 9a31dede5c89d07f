"""Agents by their rows: renamed or deleted in every table."""
