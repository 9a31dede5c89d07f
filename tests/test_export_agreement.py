"""Agreement of an export with its original: figures, verdict, and an adapter on the quantised file of its base."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from rl.agents.base import Agent
from rl.base_models.dequantise import gguf_to_folder
from rl.base_models.sources import AddedModel, model_add
from rl.evaluation.service import EvaluationOrder, evaluate
from rl.evaluation.sides import quantised_answerer
from rl.export import gguf_names, reference
from rl.export.agreement import (
    Closeness,
    Expected,
    ExportAgreement,
    FloatArray,
    Measured,
    measured,
    references_shared,
)
from rl.export.artifact import ExportRefused
from rl.export.gguf import export_gguf
from rl.export.gguf_lora import export_gguf_lora
from rl.export.source import original_of
from rl.training.held_out import HeldOutPrompt
from rl.training.policy import load_policy
from rl.training.sides import generate_answers
from tests.support.tiny_models import tiny_adapter, tiny_model


def test_the_figures_are_those_computed_by_hand() -> None:
    original = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    exported = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))

    def asked(ids: Sequence[int], positions: int) -> FloatArray:
        return exported[-positions:] if ids == [1, 2] else original[-positions:]

    found = measured(
        [
            Expected([1, 2], [0, 1], original),
            # the likeliest token is compared at both positions, the distribution at the last one
            Expected([1, 2], [0, 1], original[1:], held_out=True),
            Expected([3, 4], [0, 1], original[1:], held_out=True),
        ],
        asked,
    )
    # KL = 0.5 ln 2 - 0.25 ln 2 at the first position, 0 at the second
    assert found.texts.kl == pytest.approx(0.25 * math.log(2) / 2, rel=1e-5)
    assert (found.texts.positions, found.texts.top1_agreement, found.texts.same_answers) == (2, 0.5, None)
    assert found.held_out is not None
    assert found.held_out.kl == pytest.approx(0, abs=1e-6)
    assert (found.held_out.top1_agreement, found.held_out.same_answers) == (0.75, 1)


@pytest.mark.parametrize(("busy", "cores"), [(0.0, 4), (50.0, 2), (100.0, 1)])
def test_a_comparison_takes_the_cores_that_are_idle_now(
    monkeypatch: pytest.MonkeyPatch, busy: float, cores: int
) -> None:
    monkeypatch.setattr(reference, "cores_available", lambda: 4)
    monkeypatch.setattr(reference.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(reference.psutil, "cpu_percent", lambda seconds: busy)
    # a training that just ended is in the load average, and occupies no core
    monkeypatch.setattr(reference.os, "getloadavg", lambda: (4.0, 4.0, 4.0))
    assert reference.cores_for(1024**3) == cores
    assert reference.cores_for(1024**2) == 1


@pytest.mark.parametrize(
    ("kl", "top1", "same", "verdict"),
    [
        (0.004, 0.99, 4, "same"),
        (0.004, 0.99, 3, "close"),
        (0.004, 0.95, 4, "close"),
        (0.05, 0.99, 4, "close"),
        (0.2, 0.99, 4, "changed"),
        (0.01, 0.5, 4, "changed"),
    ],
)
def test_the_verdict_is_of_held_out_answers_where_there_are_some(
    kl: float, top1: float, same: int, verdict: str
) -> None:
    off = Closeness(prompts=10, positions=100, kl=2.0, top1_agreement=0.4)
    of = Closeness(prompts=4, positions=40, kl=kl, top1_agreement=top1, same_answers=same)
    found = ExportAgreement(policy=Measured(texts=off, held_out=of))
    assert (found.verdict, found.as_dict()["verdict"]) == (verdict, verdict)
    assert ExportAgreement.model_validate(found.as_dict()) == found
    assert ExportAgreement(policy=Measured(texts=off)).verdict == "changed"
    alone = [off.model_copy(update={"kl": kl, "top1_agreement": share}) for share in (0.96, 0.94)]
    expected = "same" if kl <= 0.01 else "close" if kl <= 0.1 else "changed"
    assert ExportAgreement(policy=Measured(texts=alone[0])).verdict == expected
    assert ExportAgreement(policy=Measured(texts=alone[1])).verdict == expected.replace("same", "close")


# --- an adapter on the quantised file that its base was made from -------------------------------------------------


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base de-quantised from a q8_0 file, with its source.json."""
    home = tmp_path_factory.mktemp("models")
    export_gguf(str(tiny_model(home / "random", "llama")), None, home / "tiny.gguf", quantization="q8_0")
    return home / model_add(str(home / "tiny.gguf"), home, gguf_to_folder).name


@pytest.fixture(scope="module")
def adapter(added: Path) -> Path:
    return tiny_adapter(added, added.parent / "lora")


ASK = [
    [{"role": "user", "content": text}]
    for text in ("Where is my lamp?", "I was billed twice.", "It does not start.")
]


@pytest.mark.slow
def test_an_adapter_fits_the_quantised_file_that_its_base_was_made_from(
    added: Path, adapter: Path, tmp_path: Path
) -> None:
    result = export_gguf_lora(str(added), adapter, tmp_path / "out", prompts=ASK)
    file, original = result.files[0].path, added.parent / "tiny.gguf"
    found = ExportAgreement.model_validate(result.equality["agreement"])
    assert found.base is not None
    assert found.policy.held_out is not None
    assert found.policy.held_out.prompts == 3
    assert found.policy.texts.kl < 0.05
    # what the adapter changes is far more than what rounding does
    assert found.base.texts.kl < 0.05
    assert result.equality["base_file"]["path"] == str(original)
    assert (
        f"FROM {original.resolve()}\nADAPTER ./{file.name}\n" in (tmp_path / "out" / "Modelfile").read_text()
    )
    readme = (tmp_path / "out" / "README.md").read_text()
    assert f"llama-server -m {original} --lora {file.name}" in readme
    assert AddedModel.load(added).gguf_sha256 in readme
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    assert {row["path"] for row in manifest["files"]} == {"Modelfile", "README.md", file.name}
    llama = llama_cpp.Llama(str(original), lora_path=str(file), n_ctx=64, verbose=False)
    assert llama("Where is my lamp?", max_tokens=2)["choices"][0]["finish_reason"] in ("stop", "length")
    llama.close()


@pytest.mark.slow
def test_exports_of_one_policy_ask_its_original_once_where_they_share_what_it_said(
    added: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    original = reference.original_model
    monkeypatch.setattr(
        reference, "original_model", lambda source: opened.append(source.name) or original(source)
    )
    with references_shared():
        export_gguf_lora(str(added), adapter, tmp_path / "lora", prompts=ASK)
        first = export_gguf(str(added), adapter, tmp_path, quantization="q8_0", prompts=ASK)
        assert len(opened) == 1
        export_gguf(str(added), adapter, tmp_path, quantization="q8_0", prompts=ASK[:1])
        assert len(opened) == 2
    again = export_gguf(str(added), adapter, tmp_path, quantization="q8_0", prompts=ASK)
    assert len(opened) == 3
    assert again.equality["agreement"] == first.equality["agreement"]


@pytest.mark.slow
@pytest.mark.django_db
def test_a_policy_answers_on_the_quantised_file_as_in_full_precision(added: Path, adapter: Path) -> None:
    agent = Agent(slug="talker", title="", description="", max_new_tokens=8)
    prompts = [HeldOutPrompt(list(turns), {}) for turns in ASK]
    own = generate_answers(load_policy(str(added), adapter), [one.messages for one in prompts], agent)
    with quantised_answerer(str(added), adapter, agent) as (answer, file):
        found = [answer(prompt) for prompt in prompts]
    assert file == added.parent / "tiny.gguf"
    # random weights are unsure of every token: most answers begin alike
    assert sum(a.text[:1] == b.text[:1] for a, b in zip(own, found, strict=True)) >= 2
    assert all(answer.finish_reason in ("stop", "length") for answer in found)


@pytest.mark.slow
@pytest.mark.django_db
def test_an_evaluation_can_be_asked_on_the_quantised_base(
    added: Path, adapter: Path, tmp_path: Path, settings: Any
) -> None:
    settings.RATCHET_HOME = tmp_path
    rows = [{"prompt": turns, "chosen": "yes", "rejected": "no"} for turns in ASK]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = EvaluationOrder(
        checkpoint=adapter, agent="talker", base_model=str(added), test_data=tmp_path / "pairs.jsonl"
    )
    found = evaluate(replace(order, quantization="gguf"))["quantised"]
    assert found["base_file"] == str(added.parent / "tiny.gguf")
    assert (found["same_answers"]["n"], found["valid_rate"]["value"]) == (3, 1.0)
    assert "quantised" not in evaluate(order)


@pytest.mark.slow
def test_an_adapter_with_rows_in_the_wrong_order_is_refused(
    added: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_names, "permute_rows", lambda tensor, heads: tensor.flip(0))
    with pytest.raises(ExportRefused, match=r"the adapter on tiny\.gguf to answer like the trained policy"):
        export_gguf_lora(str(added), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_another_file_than_the_recorded_one_is_not_taken_for_it(added: Path, tmp_path: Path) -> None:
    facts = json.loads((added / "source.json").read_text())
    (tmp_path / "source.json").write_text(json.dumps({**facts, "gguf_sha256": "0" * 64}))
    original, note = original_of(tmp_path)
    assert original is None
    assert "the adapter does not fit it" in note
    (tmp_path / "source.json").write_text(json.dumps({**facts, "gguf": "/nowhere.gguf"}))
    assert original_of(tmp_path) == (
        None,
        "/nowhere.gguf, which the base model was made from, is not there any more",
    )
    ollama = {**facts, "kind": "ollama", "source": "ollama:tiny:1b"}
    (tmp_path / "source.json").write_text(json.dumps(ollama))
    original, note = original_of(tmp_path)
    assert original is not None
    assert (original.ollama_name, note) == ("tiny:1b", "")
