"""GGUF files of the bundled base and two adapters on it, made once for all tests of serving."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from tests.tiny import tiny_adapter

BUNDLED = Path(__file__).resolve().parent.parent / "rl" / "bundled_model"


class Files(NamedTuple):
    """The base and two adapters, as GGUF and as folders."""

    base: Path
    one: Path
    two: Path
    one_folder: Path
    two_folder: Path


@functools.cache
def gguf_files() -> Files:
    """Made unchecked: what the exporters check is tested with them."""
    from rl.export.gguf_lora import lora_write
    from rl.export.gguf_names import layout_of
    from rl.export.gguf_write import writer_for
    from rl.export.source import source_open

    home = Path(mkdtemp(prefix="ratchet-gguf-"))
    plain = source_open(str(BUNDLED), None)
    writer_for(plain, None, None).write(home / "base.gguf", "f16", "base", lambda *_: None)
    for name, seed in (("one", 1), ("two", 2)):
        source = source_open(str(BUNDLED), tiny_adapter(BUNDLED, home / name, seed=seed))
        layout = layout_of(source.weights.base.config)
        assert layout is not None
        lora_write(source, layout, home / f"{name}.gguf", name)
    return Files(home / "base.gguf", home / "one.gguf", home / "two.gguf", home / "one", home / "two")
