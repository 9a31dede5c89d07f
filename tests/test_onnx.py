"""ONNX: onnxruntime's logits are those of base + adapter, whatever the batch, the padding and the length."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.checksums import FileDamaged
from rl.export import onnx as onnx_export
from rl.export.artifact import ExportRefused, ExportResult, sha256_file
from rl.export.onnx import export_onnx, session_open
from tests.support.tiny_models import tiny_adapter, tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_core() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class World:
    """An exported tiny policy, its folder, and PEFT's own base + adapter."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.base = tiny_model(folder / "base", architecture, layers=1)
        self.adapter = tiny_adapter(self.base, folder / "lora")
        self.output = folder / "onnx"
        self.result: ExportResult = export_onnx(str(self.base), self.adapter, self.output)
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        self.original = PeftModel.from_pretrained(model, str(self.adapter)).eval()

    def session(self) -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(self.output / "model.onnx", providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module", params=["llama", "qwen2", "gpt2"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gpt2":
            patch.setattr(onnx_export, "ONE_FILE_BYTES", 10_000)
        return World(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.campaign
def test_a_session_is_opened_of_whole_files_alone(world: World, tmp_path: Path) -> None:
    assert [put.name for put in session_open(world.output).get_inputs()] == ["input_ids", "attention_mask"]
    copy = shutil.copytree(world.output, tmp_path / "copy")
    weights = max(copy.iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 0x01
    weights.write_bytes(data)
    with pytest.raises(FileDamaged, match=rf"{weights.name} is damaged.*export it again"):
        session_open(copy)


@pytest.mark.campaign
def test_logits_equal_pefts_in_every_shape(world: World) -> None:
    session, generator = world.session(), torch.Generator().manual_seed(0)
    for shape in ((1, 1), (1, 300), (3, 5)):
        ids = torch.randint(5, 400, shape, generator=generator)
        with torch.no_grad():
            expected = world.original(input_ids=ids).logits.numpy()
        feed = {"input_ids": ids.numpy(), "attention_mask": np.ones(shape, np.int64)}
        (found,) = session.run(["logits"], feed)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_moves_no_logit(world: World, side: str) -> None:
    session, ids = world.session(), np.array([[17, 23, 42, 99]], np.int64)
    (alone,) = session.run(["logits"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    pads = ((0, 0), (3, 0) if side == "left" else (0, 3))
    padded = {"input_ids": np.pad(ids, pads), "attention_mask": np.pad(np.ones_like(ids), pads)}
    (found,) = session.run(["logits"], padded)
    np.testing.assert_allclose(found[:, 3:] if side == "left" else found[:, :4], alone, atol=2e-4)


def test_the_report_holds_the_greatest_difference_and_every_file(world: World) -> None:
    checked = world.result.checked
    assert 0 < checked["logprob_max_abs_diff"] < 2e-4
    assert 0 < checked["logprob_max_abs_diff_padded"] < 2e-4
    assert checked["agreement"]["policy"]["texts"]["top1_agreement"] == 1.0
    assert {file.path.name: file.sha256 for file in world.result.files} == {
        path.name: sha256_file(path) for path in world.output.iterdir()
    }
    assert json.loads((world.output / "export.json").read_text())["checked"] == checked


def test_the_folder_is_a_valid_model_with_its_tokenizer(world: World) -> None:
    onnx.checker.check_model(world.output / "model.onnx")
    tokenizer = AutoTokenizer.from_pretrained(world.output)
    assert tokenizer("a b")["input_ids"] == AutoTokenizer.from_pretrained(world.base)("a b")["input_ids"]


def test_weights_too_large_for_one_file_lie_beside_it(world: World) -> None:
    beside = world.output / "model.onnx.data"
    assert beside.exists() == (world.original.config.model_type == "gpt2")
    graph = onnx.load(world.output / "model.onnx", load_external_data=False).graph
    large = [tensor for tensor in graph.initializer if np.prod(tensor.dims) > 10_000]
    assert large
    assert all((tensor.data_location == onnx.TensorProto.EXTERNAL) == beside.exists() for tensor in large)


@pytest.mark.campaign
def test_other_logits_are_refused(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tiny_adapter(world.base, tmp_path / "other", seed=1)
    # the writer's work replaced by that of another policy
    monkeypatch.setattr(
        onnx_export,
        "onnx_write",
        lambda source, path: onnx.save(onnx.load(world.output / "model.onnx"), path),
    )
    with pytest.raises(ExportRefused, match="to compute what base"):
        export_onnx(str(world.base), other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "home") == ["other"]


def test_too_little_memory_is_refused(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export.psutil, "virtual_memory", lambda: type("Free", (), {"available": 1000}))
    monkeypatch.setattr(onnx_export, "reference_make", None)
    with pytest.raises(ExportRefused, match="of free memory"):
        export_onnx(str(world.base), world.adapter, tmp_path / "out")
