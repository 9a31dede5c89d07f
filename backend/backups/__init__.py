"""Backups: database and data folder of one moment, verified and restored."""
