"""The result file of a run: whole or refused with a reason, and a figure to look at."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rl.training.result import ResultError, TrainResult


def a_result(**changes: object) -> TrainResult:
    facts: dict = {
        "method": "dpo",
        "status": "succeeded",
        "checkpoint": "runs/17/adapter",
        "base_model": "bundled",
        "base_model_hash": "sha256:00",
        "steps": 20,
        "total_steps": 20,
        "seconds": 12.5,
        "samples": {"train": 64, "eval": 8},
        "truncated": {"prompts": 1, "completions": 0},
        "left_out": {"identical responses": 2},
        "metrics": {"loss": 0.31},
        "history": {
            "step": [float(i) for i in range(1, 21)],
            "loss": [0.69 * 0.9**i for i in range(20)],
            "rewards/accuracies": [min(1.0, 0.5 + i / 30) for i in range(20)],
            "rewards/margins": [i / 10 for i in range(20)],
            "kl": [i / 100 for i in range(20)],
            "eval_step": [20.0],
            "eval_loss": [0.4],
        },
        "recipe": {"beta": 0.1},
        "hardware": {"device": "cpu"},
        "libraries": {"torch": "2.13.0"},
        "notes": ["truncated 1 prompt"],
        **changes,
    }
    return TrainResult(**facts)


def test_a_saved_result_comes_back_the_same(tmp_path: Path) -> None:
    result = a_result()
    assert TrainResult.load(result.save(tmp_path / "deep" / "result.json")) == result


def test_numbers_json_cannot_hold_are_null_in_a_history_and_no_metric(tmp_path: Path) -> None:
    metrics = {"loss": math.nan, "logits/chosen": math.inf, "beta": 0.1}
    path = a_result(history={"step": [1.0], "loss": [math.inf]}, metrics=metrics).save(tmp_path / "r.json")
    assert json.loads(path.read_text())["history"]["loss"] == [None]
    loaded = TrainResult.load(path)
    assert math.isnan(loaded.history["loss"][0])
    assert loaded.metrics == {"beta": 0.1}


def test_saving_leaves_nothing_else_behind(tmp_path: Path) -> None:
    a_result().save(tmp_path / "run" / "result.json")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["result.json"]


def test_a_key_of_a_newer_version_is_ignored(tmp_path: Path) -> None:
    path = a_result().save(tmp_path / "result.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "blue"}))
    assert TrainResult.load(path) == a_result()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"method": "dpo",\n "status": ', "line 2"),
        (b"[1, 2]", "dictionary"),
        (b'{"loss": 1}', "method: Field required"),
        (b"\xff\xfe\x00", "utf-8"),
    ],
)
def test_a_broken_file_is_refused_with_what_is_wrong(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(ResultError, match=says):
        TrainResult.load(tmp_path / "result.json")


@pytest.mark.parametrize(
    ("change", "says"), [({"status": "running"}, "status"), ({"history": [1]}, "history")]
)
def test_a_file_with_a_wrong_value_is_refused(tmp_path: Path, change: dict, says: str) -> None:
    path = a_result().save(tmp_path / "result.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ResultError, match=says):
        TrainResult.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="found none"):
        TrainResult.load(tmp_path / "result.json")


@pytest.mark.slow
def test_the_figure_is_a_picture_with_something_on_it(tmp_path: Path) -> None:
    from matplotlib.image import imread

    picture = imread(a_result().plot(tmp_path / "plots" / "run.png"))
    empty = imread(a_result(history={}).plot(tmp_path / "empty.png"))
    assert picture.shape[0] > 700
    assert picture.shape[1] > 1200
    assert (picture[..., :3] < 0.9).mean() > (empty[..., :3] < 0.9).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "history", [{}, {"step": [1.0], "loss": [0.7]}, {"step": [1.0, 2.0], "loss": [math.nan, 0.5]}]
)
def test_short_and_broken_histories_can_be_drawn(tmp_path: Path, history: dict) -> None:
    assert a_result(history=history).plot(tmp_path / "run.svg").stat().st_size > 1000


def test_results_hardware_and_statistics_are_read_without_torch() -> None:
    code = (
        "import sys, rl.training.result, rl.training.hardware, rl.training.result, rl.statistics\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'django'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
