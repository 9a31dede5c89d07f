"""What pyproject.toml cannot say: pins taken from the requirements files, and folders that lie beside the packages."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def pins(name: str) -> list[str]:
    """Pinned requirements of a file, without those of the file that it includes by `-r`."""
    lines = (HERE / name).read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def extras(name: str) -> dict[str, list[str]]:
    """Pins of each `# [extra]` of a file."""
    parts = re.split(r"^# \[(\w+)\].*$", (HERE / name).read_text("utf-8"), flags=re.MULTILINE)
    return {extra: block.split() for extra, block in zip(parts[1::2], parts[2::2], strict=True)}


setup(
    install_requires=pins("requirements.txt"),
    extras_require={"rl": pins("requirements-rl.txt"), **extras("requirements-extras.txt")},
    packages=[
        # by name: what else lies here (tests, benchmarks, clients/, var/) is no part of the program
        *find_packages(include=["backend*", "feedback*", "rl*"]),
        # distributions of their own too, for those who want nothing else of this
        "packed_forward",
        "ratchet_client",
        "backend.templates",
        "backend.static",
        "backend.docs",
    ],
    package_dir={
        "packed_forward": "packed/src/packed_forward",
        "ratchet_client": "clients/python/src/ratchet_client",
        "backend.templates": "templates",
        "backend.static": "static",
        "backend.docs": "docs",
    },
    include_package_data=False,  # only what is listed; True takes each folder of data for a package
    package_data={
        "": [
            "*.md",
            "*.svg",
        ],  # packages with a page of their own; of docs/ the pages, which the glossary's page reads
        "backend.templates": ["**/*"],
        "backend.static": ["**/*"],
        "ratchet_client": ["py.typed"],
        "rl": ["bundled_model/*", "bundled_tasks/**/*"],
    },
    # messages name pages of the documentation
    data_files=[("share/doc/ratchet", sorted(str(p.relative_to(HERE)) for p in HERE.glob("docs/*.md")))],
)
