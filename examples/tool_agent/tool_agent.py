"""Tool-using agent: answers questions about orders with two tools, and sends a trace of every run to Ratchet.

python tool_agent.py "Where is my order 1043?"    # planned by rules; nothing else is needed
OPENAI_BASE_URL=http://localhost:11434/v1 OPENAI_API_KEY=none python tool_agent.py --model qwen3 "Where is 1043?"
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shop_tools import SCHEMAS, TOOLS

from ratchet_client import Trace, TraceCollector

AGENT = "shop-assistant"
INSTRUCTIONS = "You answer customers of a shop. Look orders and parcels up before you promise anything."
MAX_STEPS = 6


@dataclass(frozen=True)
class ToolCall:
    """A tool the planner wants called."""

    name: str
    arguments: dict[str, str]
    id: str = "call"


@dataclass(frozen=True)
class Step:
    """Next move of the planner: tools to call, or an answer; exactly one of the two."""

    calls: list[ToolCall] = field(default_factory=list)
    answer: str = ""


Planner = Callable[[list[dict[str, Any]]], Step]
"""The next step, from the messages so far."""


def rule_planner(messages: list[dict[str, Any]]) -> Step:
    """Find the order, then its parcel, then say what was found: no model at all."""
    results = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
    if not results:
        number = re.search(r"\d+", messages[1]["content"])
        if number is None:
            return Step(answer="Which order is it? Please tell me its number.")
        return Step([ToolCall("find_order", {"number": number[0]})])
    if "error" in results[-1]:
        return Step(answer="I could not look that up just now. I will write as soon as I know.")
    order = results[0]["result"]
    if len(results) == 1 and order["tracking"]:
        return Step([ToolCall("track_parcel", {"tracking": order["tracking"]})])
    return Step(answer=f"Your order is {results[1]['result'] if len(results) > 1 else order['state']}.")


def model_planner(model: str) -> Planner:
    """A model behind any OpenAI-compatible server that knows tools: OPENAI_BASE_URL and OPENAI_API_KEY say which."""
    from openai import OpenAI

    server = OpenAI()

    def plan(messages: list[dict[str, Any]]) -> Step:
        said = (
            server.chat.completions.create(model=model, messages=messages, tools=SCHEMAS).choices[0].message
        )
        calls = [
            ToolCall(call.function.name, json.loads(call.function.arguments), call.id)
            for call in said.tool_calls or []
        ]
        return Step(calls) if calls else Step(answer=said.content or "")

    return plan


def tool_run(call: ToolCall, trace: Trace) -> dict[str, Any]:
    """Call a tool within the trace; an error is told to the planner, and stands in the trace."""
    with trace.tool_call(call.name, call.arguments) as span:
        try:
            result = TOOLS[call.name](**call.arguments)
        except Exception as error:  # a tool that fails is part of an agent's day
            span.error(error)
            return {"error": str(error)}
        span.result(result)
        return {"result": result}


def answer(question: str, planner: Planner, collector: TraceCollector, *, policy: str) -> tuple[str, str]:
    """Answer a question; returns the answer and the id of the decision it is recorded as."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": question},
    ]
    prompt = list(messages)
    has_failed = False
    with collector.trace(policy=policy) as trace:
        for _ in range(MAX_STEPS):
            step = planner(messages)
            if not step.calls:
                break
            trace.reasoning(f"look up: {', '.join(call.name for call in step.calls)}")
            calls = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in step.calls
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            for call in step.calls:
                outcome = tool_run(call, trace)
                has_failed = has_failed or "error" in outcome
                messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(outcome)})
        said = step.answer or "I could not find that out."
        decision = trace.decision(prompt, said)
        if has_failed or not step.answer:
            trace.task_failed("answer the customer", "something could not be looked up")
        else:
            trace.task_completed("answer the customer")
    return said, decision


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer questions about orders, with traces")
    parser.add_argument("question", nargs="+")
    parser.add_argument("--model", help="of the server at OPENAI_BASE_URL (default: planned by rules)")
    parser.add_argument("--url", default=os.environ.get("RATCHET_URL", "http://localhost:8000"))
    parser.add_argument("--key", default=os.environ.get("RATCHET_KEY", ""), help="with the scope ingest")
    parser.add_argument("--outbox", type=Path, default=Path(tempfile.gettempdir()) / "shop-assistant-outbox")
    options = parser.parse_args()
    planner, policy = (
        (model_planner(options.model), options.model) if options.model else (rule_planner, "rules")
    )
    with TraceCollector(AGENT, options.url, options.key, options.outbox) as collector:
        for question in options.question:
            said, decision = answer(question, planner, collector, policy=policy)
            print(f"{said}\n  {options.url}/decisions/{decision}/")
        if not collector.flush(10):
            print(f"not sent yet, kept in {options.outbox}: {collector.status()}")


if __name__ == "__main__":
    main()
