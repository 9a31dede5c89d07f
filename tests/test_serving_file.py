"""The GGUF file that serves a base: quantised where it agrees with float16."""

from pathlib import Path

import pytest

import rl.export.agreement
from rl.base_models.sources import AddedModel
from rl.export import gguf as serving_file
from rl.export.artifact import sha256_file
from rl.export.gguf import serving_file_write
from rl.export.source import original_of
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.slow


@pytest.mark.campaign
def test_the_first_file_that_agrees_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_model(tmp_path / "base", "llama")
    folder = tmp_path / "files"
    folder.mkdir()
    assert serving_file_write(str(base), folder)[0] == "f16"  # too small to quantise

    monkeypatch.setattr(serving_file, "SMALL_BYTES", 0)
    monkeypatch.setattr(rl.export.agreement, "SAME_KL", 0.1)
    monkeypatch.setattr(rl.export.agreement, "SAME_TOP1", 0.5)
    assert serving_file_write(str(base), folder)[0] == "q8_0"
    assert [file.name for file in folder.iterdir()] == ["base-q8_0.gguf"]

    monkeypatch.setattr(rl.export.agreement, "SAME_KL", -1.0)
    quantization, result = serving_file_write(str(base), folder)
    assert (quantization, result.files[0].path) == ("f16", folder / "base-f16.gguf")
    assert [file.name for file in folder.iterdir()] == ["base-f16.gguf"]
    assert "KL divergence" in result.notes[-1]


def test_a_file_that_was_changed_is_the_original_no_more(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF of a model")
    assert original_of(tmp_path)[0] is None
    AddedModel("m", str(file), "gguf", file.name, sha256_file(file)).save(tmp_path)
    found, _ = original_of(tmp_path)
    assert found.file == file
    file.write_bytes(b"GGUF of another")
    assert original_of(tmp_path)[0] is None
