"""POST /api/score/: a reward model's scores, from a child process that holds torch, guarded and bounded."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from rl.evaluation import scorer, scorer_process
from rl.evaluation.scorer import ScorerAway
from rl.evaluation.scorer_process import Scorer
from rl.models import RewardModelVersion
from rl.reward_models.service import RewardModelRefused
from tests.support.api_client import ApiClient, error_of
from tests.support.server import Server

pytestmark = pytest.mark.django_db

SCORE = "/api/score/"
BODY = {"agent": "bot", "prompt": "which chart?", "responses": ["a line", "a table"]}


@pytest.fixture
def app() -> ApiClient:
    return ApiClient("ingest", "read")


@pytest.fixture
def judge() -> RewardModelVersion:
    return RewardModelVersion.objects.create(
        name="bot-rm-v9", agent="bot", stage="champion", base_model="bundled", path="nowhere", sha256="",
        objective="binary", feedback_count=9, ranking={"value": 0.9, "low": 0.7, "high": 1.0, "n": 30},
    )  # fmt: skip


def test_each_response_gets_a_score_of_the_named_model(
    app: ApiClient, judge: RewardModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def ask(call: dict[str, Any]) -> dict[str, Any]:
        asked.append(call)
        return {"scores": [3.0, -1.0], "rewards": [1.5, -2.0]}

    monkeypatch.setattr(scorer, "_ask", ask)
    answer = app.post(SCORE, BODY)
    assert answer.status_code == 200
    assert answer.json() == {
        "agent": "bot", "rewardModel": "bot-rm-v9", "objective": "binary", "betterThanACoin": True,
        "scores": [{"score": 3.0, "reward": 1.5}, {"score": -1.0, "reward": -2.0}],
    }  # fmt: skip
    assert asked[0]["messages"] == [{"role": "user", "content": "which chart?"}]
    named = {
        **BODY,
        "rewardModel": "bot-rm-v9",
        "messages": [{"role": "user", "content": "q"}],
        "prompt": None,
    }
    assert app.post(SCORE, named).status_code == 200
    listed = app.get("/api/reward-models/", agent="bot").json()["results"]
    assert [(row["name"], row["better_than_a_coin"]) for row in listed] == [("bot-rm-v9", True)]


@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"agent": "nobody"}, 404, "agent"),
        ({"rewardModel": "other-rm-v1"}, 404, "rewardModel"),
        ({"responses": []}, 400, "responses"),
        ({"responses": ["x"] * 65}, 400, "responses"),
        ({"responses": ["x" * 200_001]}, 400, "responses"),
        ({"responses": "x"}, 400, "responses"),
        ({"responses": [1]}, 400, "responses[0]"),
        ({"prompt": ""}, 400, "prompt"),
        ({"messages": "q"}, 400, "messages"),
        ({"prompt": None, "messages": [{"role": "nobody", "content": "q"}]}, 400, "messages[0].role"),
        ({"prompt": None, "messages": 5}, 400, "messages"),
        ({"more": 1}, 400, "more"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_refused_by_field(
    app: ApiClient, judge: RewardModelVersion, changes: dict[str, Any], status: int, field: str
) -> None:
    response = app.post(SCORE, {**BODY, **changes})
    assert response.status_code == status, response.content
    assert field in error_of(response)["fields"]


@pytest.mark.slow
def test_where_nobody_scores_the_answer_says_when_to_come_back(
    app: ApiClient, judge: RewardModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "START_S", 0.3)
    started: list[int] = []
    monkeypatch.setattr(scorer, "_start", lambda: bool(started.append(1)) or True)
    response = app.post(SCORE, BODY)
    assert (response.status_code, response["Retry-After"], len(started)) == (503, "5", 1)
    assert error_of(response)["code"] == "unavailable"


def test_only_so_many_threads_of_a_web_process_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "_calls", threading.BoundedSemaphore(1))
    monkeypatch.setattr(scorer, "_ask_patiently", lambda call: scorer._ask(call))
    with pytest.raises(ScorerAway, match="too many requests wait for scores"):
        scorer._ask({})


class Judge:
    """Scores a response by its length."""

    def scores(self, items: list[tuple[Any, str]]) -> list[float]:
        return [float(len(response)) for _, response in items]

    def to_raw(self, score: float) -> float:
        return min(2.0, score)


def test_a_scorer_holds_two_models_and_says_what_it_cannot_open() -> None:
    opened: list[str] = []

    def load(name: str) -> Judge:
        opened.append(name)
        if name == "broken":
            raise RewardModelRefused("its SHA-256 differs")
        return Judge()

    held = Scorer(load)
    for name in ("a", "b", "a", "c", "b"):
        found = held.answer({"name": name, "messages": [], "responses": ["xyz", "x"]})
        assert found == {"scores": [3.0, 1.0], "rewards": [2.0, 1.0]}
    assert opened == ["a", "b", "c", "b"]
    assert held.answer({"name": "broken", "messages": [], "responses": ["x"]}) == {
        "refused": "its SHA-256 differs"
    }


@pytest.mark.slow
def test_a_scorer_answers_its_owner_alone_and_ends_when_nobody_asks(
    ratchet_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer_process, "registered_load", lambda name: Judge())
    ran: list[bool] = []
    thread = threading.Thread(target=lambda: ran.append(scorer_process.scorer_run(2.0)))
    thread.start()
    while not scorer.place().exists():
        pass
    assert scorer.place().stat().st_mode & 0o077 == 0
    assert scorer._ask_once({"name": "a", "messages": [], "responses": ["xyz"]})["scores"] == [3.0]
    assert not scorer_process.scorer_run(1.0), "a second one beside it ends at once"
    port = json.loads(scorer.place().read_text())["port"]
    for line in (b'{"token": "guessed", "name": "a"}\n', b"GET / HTTP/1.1\r\n", b"[]\n"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(line)
            assert stranger.makefile("rb").readline() == b""
    thread.join(10)
    assert (ran, scorer.place().exists()) == ([True], False)


@pytest.mark.campaign
@pytest.mark.training
def test_a_server_scores_without_torch_in_its_web_process(tmp_path: Path) -> None:
    """The real thing: a registered reward model on the bundled base, asked through gunicorn and the child it starts."""
    import hashlib

    from rl.recipes import RewardModelRecipe
    from rl.training.reward_model import train_reward_model
    from tests.support.dpo_runs import HARDWARE

    rows = [
        {
            "prompt": [{"role": "user", "content": f"which chart {n}?"}],
            "chosen": "a line",
            "rejected": "a table",
        }
        for n in range(8)
    ]
    recipe = RewardModelRecipe(max_steps=4, learning_rate=1e-2, lora_r=2, lora_alpha=4, max_length=64)
    home = tmp_path / "reward_models" / "bot"
    model, result = train_reward_model(rows, recipe, output_dir=home, hardware=HARDWARE)
    folder = Path(result.checkpoint)
    digest = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    server = Server(f"sqlite:///{tmp_path / 'db.sqlite3'}", tmp_path, workers=1)
    server.environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    server.migrate()
    server.manage(
        "shell", "-c",
        "from rl.models import RewardModelVersion as V\n"
        f"V.objects.create(name='bot-rm-v8', agent='bot', stage='champion', base_model='bundled', objective='pairwise',"
        f" feedback_count=8, path={str(folder.relative_to(tmp_path))!r}, sha256={digest!r})",
    )  # fmt: skip
    key = server.key("ingest")
    with server:
        for _ in range(20):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=90)
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request("POST", SCORE, json.dumps({**BODY, "prompt": "which chart 3?"}), headers)
            answer = connection.getresponse()
            body = json.loads(answer.read())
            if answer.status != 503:
                break
        assert answer.status == 200, body
    expected = model.scores([(rows[3]["prompt"], text) for text in BODY["responses"]])  # type: ignore[misc, union-attr]
    assert [row["score"] for row in body["scores"]] == pytest.approx(expected, abs=0.05)
    assert body["scores"][0]["score"] > body["scores"][1]["score"]
