"""Restore a backup."""

from __future__ import annotations

from pathlib import Path

from backend.backups.archive import restore
from backend.command import CommandOptions, RatchetCommand, Result
from backend.database import migrations_waiting


class Options(CommandOptions):
    folder: Path
    """Folder that `backup` wrote. Example: /backups/monday"""
    overwrite: bool = False
    """Restore over existing data: RATCHET_HOME's contents are moved to before-restore-<time>, a
    PostgreSQL database's tables are replaced in one transaction (default: refuse)."""


class Command(RatchetCommand[Options, Result]):
    writes = False
    help = (
        "Verify a backup, then restore the database and RATCHET_HOME from it. Stop the server first. "
        "Example: manage.py restore /backups/2026-11-22"
    )

    def work(self, options: Options) -> Result:
        manifest = restore(options.folder, overwrite=options.overwrite)
        return {
            "folder": str(options.folder.resolve()),
            "made": manifest.created_at,
            "version": manifest.ratchet,
            "files": len(manifest.files),
            "bytes": manifest.bytes,
            "decisions": manifest.rows.get("feedback_decision", 0),
            "migrations_waiting": migrations_waiting(),
        }

    def show(self, result: Result) -> None:
        self.stdout.write(
            f"restored the backup of {result['made']} (Ratchet {result['version']}): {result['files']} files, "
            f"{result['bytes'] / 1e6:,.1f} MB, {result['decisions']:,} decisions"
        )

    def next_step(self, result: Result) -> str:
        first = "python manage.py migrate, then " if result["migrations_waiting"] else ""
        return f"{first}python manage.py doctor"
