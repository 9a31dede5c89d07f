"""The REST endpoint of a policy's benchmark results."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from backend.installation import PROGRAM
from backend.rest.reading import parameters
from backend.rest.schema import describe, list_schema, ref
from backend.rest.views import ApiView
from rl.api.loop import NAME, policy_lookup
from rl.registry.gate_evidence import benchmark_summary, benchmarks_newest


class Benchmarks(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read a policy's benchmark results, its base's beside them",
        {200: ("The newest of each task, by name", list_schema(ref("BenchmarkResult")))},
        parameters=(NAME,),
        refusals=(404,),
        tag="policies",
        operation="policies_benchmarks",
        description=f"Run by `{PROGRAM} benchmark_model`; empty for a policy that was not benchmarked.",
    )
    def get(self, request: Request, name: str) -> Response:
        parameters(request, ())
        return Response([benchmark_summary(result) for result in benchmarks_newest(policy_lookup(name))])
