"""Tiny models to export: a base, an adapter on it, and one core for programs that compare their numbers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import tiny_adapter, tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama") / "base", "llama")


@pytest.fixture(scope="module")
def llama_lora(llama: Path) -> Path:
    return tiny_adapter(llama, llama.parent / "lora")


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
