"""The fine-tuning guide, followed with OpenAI's own client against a server and its worker."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.server import ROOT, Server
from tests.test_fine_tuning import chat_line, lines, preference_line


def guide_code(server: Server, key: str, method: str) -> str:
    """The guide's first code, for a server and a method."""
    page = (ROOT / "docs" / "fine-tuning.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(import time.*?)```", page, re.DOTALL)
    wanted = {
        "http://localhost:8000": server.address,
        "rk_...": key,
        '{"type": "supervised"}': json.dumps({"type": method}),
    }
    for told, own in wanted.items():
        assert told in code
        code = code.replace(told, own)
    return code


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_the_guide_ends_with_an_answer_of_the_fine_tuned_model(tmp_path: Path, method: str) -> None:
    line = preference_line if method == "dpo" else chat_line
    (tmp_path / "train.jsonl").write_bytes(lines([line(n) for n in range(120)]))
    server = Server(f"sqlite:///{tmp_path / 'db.sqlite3'}", tmp_path, workers=1)
    server.environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    server.migrate()
    key = server.key("ingest", "read", "operate")
    began = time.monotonic()
    with server, server.training_worker():
        said = subprocess.run(
            [sys.executable, "-c", guide_code(server, key, method)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    print(f"{method}: {(time.monotonic() - began) / 60:.1f} minutes from upload to the deleted model")
    assert said.returncode == 0, (said.stderr, server.log())
    *events, answer = said.stdout.strip().split("\n")
    assert "The job has successfully completed" in events
    assert any(
        event.startswith("New fine-tuned model created: ft:bundled:assistant:even:") for event in events
    )
    assert answer
