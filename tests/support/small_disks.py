"""Small disks for tests: a tmpfs of a few megabytes that can be filled, or made read-only."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

IN_NAMESPACE = "RATCHET_TESTS_IN_NAMESPACE"
"""Set in the pytest that a test started in a mount namespace of its own, where mounting is permitted."""
SIZE = "4m"


class SmallDisk:
    """A mounted folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Leave no block free."""
        descriptor = os.open(self.folder / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            while True:
                os.write(descriptor, b"x" * 4096)
        except OSError:
            os.close(descriptor)

    def free(self) -> None:
        (self.folder / "filler").unlink()

    def lock(self) -> None:
        """Make it read-only, by a bind of itself that lies over it: works although files are open for writing."""
        _mount("--bind", str(self.folder), str(self.folder))
        _mount("-o", "remount,ro,bind", str(self.folder))

    def unlock(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of 4 MB, or of the size the test is parametrized with; skips where this user may not mount
    (`test_in_a_namespace` runs these tests there)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", f"size={getattr(request, 'param', SIZE)}", "tmpfs", str(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs to mount a small disk, which is not permitted here: {error}")
    try:
        yield SmallDisk(folder)
    finally:
        # the bind of a read-only disk first, where it still stands
        while os.path.ismount(folder):
            subprocess.run(["umount", "-l", str(folder)], check=True)
