"""A real MLflow server, which has an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.server import ROOT, free_port, program_started

VERSION = re.findall(r"(?m)^mlflow-skinny==(\S+)$", (ROOT / "requirements-extras.txt").read_text("utf-8"))[0]
START_S = 600


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the server. MLFLOW_PYTHON: the Python of an environment that has it; else one is made."""
    home = tmp_path_factory.mktemp("mlflow")
    python = os.environ.get("MLFLOW_PYTHON", "")
    if not python:
        subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
        python = str(home / "venv" / "bin" / "python")
        install = [python, "-m", "pip", "install", "-q", "--prefer-binary", f"mlflow=={VERSION}"]
        if subprocess.run(install, check=False).returncode:
            pytest.skip("MLflow's server cannot be installed here")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    places = [
        "--backend-store-uri",
        f"sqlite:///{home}/mlflow.db",
        "--artifacts-destination",
        str(home / "files"),
    ]
    # without MLflow's own job runner, whose processes nothing here needs
    calm = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "PYTHONPATH": "",
    }
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command = [python, "-m", "mlflow", "server", *places, *arguments]
    with program_started(command, f"{address}/health", home, START_S, env={**os.environ, **calm}):
        yield address
