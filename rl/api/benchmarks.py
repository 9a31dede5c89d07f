"""The REST endpoint of a policy's benchmark results."""

from __future__ import annotations

from typing import Literal

from pydantic import RootModel
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Query, Time
from backend.installation import PROGRAM
from backend.rest.reading import query_read
from backend.rest.schema import describe
from backend.rest.views import ApiView
from rl.api.loop import NAME, policy_lookup
from rl.registry.gate_evidence import benchmark_summary, benchmarks_newest


class Measured(Answer):
    value: float
    stderr: float


class BenchmarkResult(Answer):
    task: str
    version: str
    sha256: str
    """Of the task's files; empty for a task of the hub."""
    source: Literal["bundled", "installed", "folder", "hub"]
    harness: str
    metric: str
    fewshot: int
    chat_template: bool
    limit: int | None
    """First items alone; null: all."""
    n: int
    own: Measured
    base: Measured
    difference: dict[str, float]
    """Policy minus base on the same items: value, low, high (95 %), p; shares in [0, 1]."""
    stale: str
    """Why the result is out of date; empty if it is current."""
    seconds: float
    created_at: Time


class BenchmarkResults(RootModel[list[BenchmarkResult]]):
    """The newest of each task."""


class Benchmarks(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read a policy's benchmark results, its base's beside them",
        {200: ("The newest of each task, by name", BenchmarkResults)},
        parameters=(NAME,),
        refusals=(404,),
        tag="policies",
        operation="policies_benchmarks",
        description=f"Run by `{PROGRAM} benchmark_model`; empty for a policy that was not benchmarked.",
    )
    def get(self, request: Request, name: str) -> Response:
        query_read(Query, request)
        results = benchmarks_newest(policy_lookup(name))
        return Response([BenchmarkResult.of(benchmark_summary(result)) for result in results])
