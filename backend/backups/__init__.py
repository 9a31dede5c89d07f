"""Backups of an installation: its database and its data folder as of one moment, verified, and put back."""
