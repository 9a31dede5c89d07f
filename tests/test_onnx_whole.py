"""ONNX of a fully fine-tuned policy whose base is stored in half precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.export.onnx import export_onnx
from rl.recipes import SFT_CONFIG
from rl.training.sft import SFTTrainer
from tests.support.tiny_models import tiny_model
from tests.test_full_fine_tuning import HALF, WHOLE, rows


@pytest.mark.campaign
@pytest.mark.training
def test_whole_weights_on_a_base_of_half_precision_are_exported_as_they_are_served(tmp_path: Path) -> None:
    half = str(tiny_model(tmp_path / "half", dtype="bfloat16"))
    recipe = SFT_CONFIG["cpu"].with_knobs(**WHOLE)
    trained = SFTTrainer(recipe, half, output_dir=tmp_path / "run", hardware=HALF).train(
        rows(completion="table")
    )
    written = export_onnx(half, Path(trained.checkpoint), tmp_path / "onnx")
    assert written.equality["agreement"]["policy"]["texts"]["top1_agreement"] == 1
