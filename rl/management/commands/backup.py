"""Back up the database and the data folder while everything runs."""

from __future__ import annotations

from pathlib import Path

from backend.backups.archive import backup
from backend.command import CommandOptions, RatchetCommand, Result


class Options(CommandOptions):
    folder: Path
    """New or empty folder to write to. Example: /backups/monday"""


class Command(RatchetCommand[Options, Result]):
    writes = False
    help = (
        "Copy the database and the files of RATCHET_HOME (without caches) to a folder: one consistent "
        "state, also while the server runs; every copied file is read back and checked. Example: "
        "manage.py backup /backups/2026-11-22"
    )

    def work(self, options: Options) -> Result:
        with self.bar("backup (bytes)") as bar:
            manifest = backup(options.folder, lambda done, total: bar.update(done, max(done, total)))
        return {
            "folder": str(options.folder.resolve()),
            "bytes": manifest.bytes,
            "files": len(manifest.files),
            "database": manifest.database,
            "decisions": manifest.rows.get("feedback_decision", 0),
            "vanished": manifest.vanished,
            "verified": True,
        }

    def show(self, result: Result) -> None:
        self.stdout.write(
            f"{result['folder']}: {result['files']} files, {result['bytes'] / 1e6:,.1f} MB, "
            f"{result['decisions']:,} decisions; every file was read back and matches its checksum"
        )
        if result["vanished"]:
            self.stdout.write(
                f"{len(result['vanished'])} files are not in the backup: the server removed "
                "them while it was made"
            )

    def next_step(self, result: Result) -> str:
        return (
            "copy it to another machine; to test it, restore it into an empty folder: RATCHET_HOME=NEW "
            f"python manage.py restore {result['folder']}"
        )
