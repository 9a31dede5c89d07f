"""Watching an agent changes nothing about it, whatever kind of agent it is."""

import asyncio
import copy
import functools
import inspect
import pickle
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_server import spooled, steps
from ratchet_client import Trace, TraceCollector, hook_into_agent


@pytest.fixture
def collector(tmp_path: Path) -> TraceCollector:
    """One without a server: what it records is read back from the spool."""
    return TraceCollector("support-bot", spool_dir=tmp_path / "spool", fsync=False)


class Bot:
    """An agent with a run, tools of several kinds, and state."""

    subclasses: list[type] = []

    def __init__(self, name: str = "bot") -> None:
        self.name = name

    def __init_subclass__(cls) -> None:
        Bot.subclasses.append(cls)

    def run(self, question: str, *, depth: int = 0) -> str:
        """Answer."""
        if depth:
            return self.run(question, depth=depth - 1)
        return f"{self.name}: {self.search_tool(question, limit=2)} {self.call_tool('clock', {})}"

    def search_tool(self, query: str, limit: int = 10) -> list[str]:
        return [query] * limit

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        if name == "broken":
            raise OSError("gone")
        return "12:00"

    @staticmethod
    def tool_double(x: int) -> int:
        return 2 * x

    def fail(self, question: str) -> str:
        raise RuntimeError("cannot")


def test_a_hooked_run_is_recorded_with_its_tools_and_as_a_decision(collector: TraceCollector) -> None:
    bot = Bot()
    with hook_into_agent(bot, collector, unit=lambda question, **_: f"asked {question}", policy="bot-v1"):
        assert bot.run("when") == "bot: ['when', 'when'] 12:00"
    run, search, clock, decision = steps(collector)
    assert (run["kind"], run["name"], run["status"]) == ("task", "run", "returned")
    assert run["arguments"] == {"question": "when"}
    assert run["result"] == "bot: ['when', 'when'] 12:00"
    assert (search["kind"], search["name"], search["parent"]) == ("tool_call", "search_tool", run["n"])
    assert (search["arguments"], search["result"]) == ({"query": "when", "limit": 2}, ["when", "when"])
    assert (clock["name"], clock["result"]) == ("clock", "12:00")
    assert decision["messages"] == [{"role": "user", "content": "when"}]
    assert decision["response"] == run["result"]
    assert (decision["unit"], decision["policy"]) == ("asked when", "bot-v1")


def test_a_run_within_a_run_is_a_step_of_it(collector: TraceCollector) -> None:
    bot = Bot()
    with hook_into_agent(bot, collector, tool_methods=[]):
        bot.run("q", depth=2)
    found = steps(collector)
    expected = [("task", None), ("step", 0), ("step", 1), ("decision", None)]
    assert [(s["kind"], s["parent"]) for s in found] == expected


def test_an_error_goes_through_and_is_recorded(collector: TraceCollector) -> None:
    bot = Bot()
    with hook_into_agent(bot, collector, ["fail"]), pytest.raises(RuntimeError, match="cannot"):
        bot.fail("q")
    (sent,) = spooled(collector)
    (run,) = sent["steps"]
    assert (run["status"], run["error"]) == ("failed", "RuntimeError: cannot")
    assert sent["metadata"]["status"] == "failed"


def test_a_tool_outside_a_run_makes_a_trace_of_its_own(collector: TraceCollector) -> None:
    bot = Bot()
    with hook_into_agent(bot, collector):
        assert bot.tool_double(4) == 8
        with pytest.raises(OSError, match="gone"):
            bot.call_tool("broken", {})
    double, broken = spooled(collector)
    assert (double["steps"][0]["arguments"], double["steps"][0]["result"]) == ({"x": 4}, 8)
    assert broken["steps"][0]["error"] == "OSError: gone"
    assert broken["metadata"]["status"] == "failed"


def test_only_the_one_instance_is_watched(collector: TraceCollector) -> None:
    bot, other = Bot(), Bot()
    before = dict(vars(Bot))
    with hook_into_agent(bot, collector):
        other.run("unwatched")
    assert spooled(collector) == []
    assert dict(vars(Bot)) == before


def test_unhooking_restores_the_agent_exactly(collector: TraceCollector) -> None:
    bot = Bot()
    before = (type(bot), dict(vars(bot)), bot.run, bot.search_tool)
    hook = hook_into_agent(bot, collector)
    assert bot.run != before[2]
    hook.unhook()
    hook.unhook()
    assert (type(bot), dict(vars(bot)), bot.run, bot.search_tool) == before
    bot.run("q")
    assert spooled(collector) == []


def test_a_hooked_agent_looks_the_same(collector: TraceCollector) -> None:
    bot = Bot()
    with hook_into_agent(bot, collector):
        assert isinstance(bot, Bot)
        assert type(bot).__name__ == "Bot"
        assert inspect.signature(bot.run) == inspect.signature(Bot().run)
        assert inspect.signature(bot.tool_double) == inspect.signature(Bot.tool_double)
        assert (bot.run.__name__, bot.run.__doc__) == ("run", "Answer.")
        assert Bot.subclasses == []  # no registry of subclasses hears of it


def test_a_copy_of_a_hooked_agent_is_an_agent_of_its_own(collector: TraceCollector) -> None:
    bot = Bot("one")
    with hook_into_agent(bot, collector):
        for made in (copy.copy(bot), copy.deepcopy(bot), pickle.loads(pickle.dumps(bot))):
            assert type(made) is Bot
            made.name = "two"
            assert made.run("q").startswith("two")
    assert spooled(collector) == []


def test_an_agent_is_hooked_once(collector: TraceCollector) -> None:
    bot = Bot()
    hook = hook_into_agent(bot, collector)
    with pytest.raises(ValueError, match="watched already"):
        hook_into_agent(bot, collector)
    hook.unhook()
    hook_into_agent(bot, collector).unhook()


def test_a_method_that_is_not_there_is_named(collector: TraceCollector) -> None:
    with pytest.raises(ValueError, match=r"found no runn; it has .*run"):
        hook_into_agent(Bot(), collector, ["runn"])
    with pytest.raises(ValueError, match="name them with run_methods"):
        hook_into_agent(SimpleNamespace(value=1), collector)
    with pytest.raises(ValueError, match="cannot be replaced"):
        hook_into_agent(len, collector)


class Slotted:
    __slots__ = ("answer",)

    def __call__(self, question: str) -> str:
        return self.answer + question


def test_a_callable_agent_with_slots_is_watched(collector: TraceCollector) -> None:
    agent = Slotted()
    agent.answer = "a "
    with hook_into_agent(agent, collector):
        assert agent("q") == "a q"
    assert type(agent) is Slotted
    assert steps(collector)[0]["name"] == "__call__"


@dataclass(frozen=True)
class Frozen:
    answer: str

    def invoke(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"output": self.answer + state["input"]}


def test_a_frozen_agent_is_watched_and_mappings_are_read(collector: TraceCollector) -> None:
    agent = Frozen("a ")
    with hook_into_agent(agent, collector):
        agent.invoke({"input": "q"})
    decision = steps(collector)[-1]
    assert (decision["messages"][0]["content"], decision["response"]) == ("q", "a q")
    assert agent == Frozen("a ")


def test_functions_held_by_the_instance_are_watched_and_put_back(collector: TraceCollector) -> None:
    def run(question: str) -> str:
        return question.upper()

    agent = SimpleNamespace(run=run, partial_tool=functools.partial(int, base=2))
    with hook_into_agent(agent, collector):
        agent.run("q")
        assert agent.partial_tool("101") == 5
    assert agent.run is run
    assert [trace["steps"][0]["name"] for trace in spooled(collector)] == ["run", "partial_tool"]


def test_a_prompt_and_response_of_the_apps_own_kind(collector: TraceCollector) -> None:
    class Filer:
        def run(self, path: Path) -> Path:
            return Path("archive") / path

    agent = Filer()
    with hook_into_agent(
        agent,
        collector,
        prompt=lambda path: f"Where does {path} go?",
        response=lambda found: found.parent.name,
    ):
        agent.run(Path("a.txt"))
    decision = steps(collector)[-1]
    assert decision["messages"][0]["content"] == "Where does a.txt go?"
    assert decision["response"] == "archive"


def test_a_decision_recorded_by_the_run_itself_is_the_only_one(collector: TraceCollector) -> None:
    class Own:
        def run(self, question: str) -> str:
            collector.decision("the real prompt", "yes")
            return "yes"

    agent = Own()
    with hook_into_agent(agent, collector):
        agent.run("q")
    decisions = [s for s in steps(collector) if s["kind"] == "decision"]
    assert [d["messages"][0]["content"] for d in decisions] == ["the real prompt"]


class AsyncBot:
    async def arun(self, question: str) -> str:
        await asyncio.sleep(0.001)
        found = await self.asearch_tool(question)
        await asyncio.sleep(0)
        return f"{found}!"

    async def asearch_tool(self, query: str) -> str:
        await asyncio.sleep(0.001)
        return query * 2

    def stream(self, question: str) -> Iterator[str]:
        yield from (question, " ")
        yield self.look_tool()

    def look_tool(self) -> str:
        return "seen"

    async def astream(self, question: str) -> AsyncIterator[str]:
        yield question
        await asyncio.sleep(0)
        yield self.look_tool()


def test_concurrent_tasks_do_not_mix(collector: TraceCollector) -> None:
    bot = AsyncBot()

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(bot.arun(str(i)) for i in range(30)))

    with hook_into_agent(bot, collector):
        assert asyncio.run(all_at_once()) == [f"{i}{i}!" for i in range(30)]
    found = spooled(collector)
    assert len(found) == 30
    for trace in found:
        run, search, decision = trace["steps"]
        question = run["arguments"]["question"]
        assert search["arguments"] == {"query": question}
        assert decision["response"] == f"{question}{question}!"


def test_functions_keep_their_kind(collector: TraceCollector) -> None:
    bot = AsyncBot()
    with hook_into_agent(bot, collector):
        assert inspect.iscoroutinefunction(bot.arun)
        assert inspect.isgeneratorfunction(bot.stream)
        assert inspect.isasyncgenfunction(bot.astream)


def test_a_stream_is_recorded_whole_and_the_consumer_stays_outside(collector: TraceCollector) -> None:
    bot = AsyncBot()
    with hook_into_agent(bot, collector):
        for _ in bot.stream("q"):
            assert collector.current() is None
    run, look, decision = steps(collector)
    assert run["result"] == decision["response"] == "q seen"
    assert look["parent"] == run["n"]


def test_an_asynchronous_stream_is_recorded_whole(collector: TraceCollector) -> None:
    bot = AsyncBot()

    async def consume() -> list[str]:
        return [part async for part in bot.astream("q")]

    with hook_into_agent(bot, collector):
        assert asyncio.run(consume()) == ["q", "seen"]
    run, look, decision = steps(collector)
    assert run["result"] == decision["response"] == "qseen"
    assert look["parent"] == run["n"]


def test_a_stream_left_early_is_recorded_so_far(collector: TraceCollector) -> None:
    bot = AsyncBot()
    with hook_into_agent(bot, collector):
        stream = bot.stream("q")
        assert next(stream) == "q"
        stream.close()  # type: ignore[attr-defined]
    assert steps(collector)[0]["result"] == "q"


def test_generators_take_what_is_sent_and_thrown_in(collector: TraceCollector) -> None:
    class Talk:
        def run(self) -> Any:
            got = yield 1
            try:
                yield got
            except KeyError:
                yield "caught"
            return "end"

        async def arun(self) -> Any:
            got = yield 1
            try:
                yield got
            except KeyError:
                yield "caught"

    async def talk(stream: Any) -> list[Any]:
        found = [await stream.__anext__(), await stream.asend("hello"), await stream.athrow(KeyError())]
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()
        return found

    agent = Talk()
    with hook_into_agent(agent, collector):
        stream = agent.run()
        assert [next(stream), stream.send("hello"), stream.throw(KeyError())] == [1, "hello", "caught"]
        with pytest.raises(StopIteration) as stop:
            next(stream)
        assert stop.value.value == "end"
        assert asyncio.run(talk(agent.arun())) == [1, "hello", "caught"]
    sync, asynchronous = spooled(collector)
    assert sync["steps"][0]["result"] == "end"
    assert asynchronous["steps"][0]["result"] == [1, "hello", "caught"]


def test_a_cancelled_run_is_recorded_as_cancelled(collector: TraceCollector) -> None:
    class Slow:
        async def run(self, question: str) -> str:
            await asyncio.sleep(60)
            return question

    async def cancel() -> None:
        task = asyncio.create_task(agent.run("q"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    agent = Slow()
    with hook_into_agent(agent, collector):
        asyncio.run(cancel())
    assert steps(collector)[0]["error"] == "CancelledError"


def test_a_tool_in_a_thread_of_the_agent_belongs_to_its_run(collector: TraceCollector) -> None:
    class Pooled:
        def run(self, question: str) -> str:
            with ThreadPoolExecutor(2) as pool:
                return ",".join(pool.map(self.upper_tool, [question, question]))

        def upper_tool(self, text: str) -> str:
            return text.upper()

    agent = Pooled()
    with hook_into_agent(agent, collector):
        assert agent.run("q") == "Q,Q"
    assert [step["name"] for step in steps(collector)] == ["run", "upper_tool", "upper_tool", ""]


def test_a_future_a_run_returns_is_followed_and_stays_a_future(collector: TraceCollector) -> None:
    class Later:
        def run(self, question: str) -> Any:
            return pool.submit(str.upper, question)

    agent = Later()
    with ThreadPoolExecutor(1) as pool, hook_into_agent(agent, collector):
        assert agent.run("q").result() == "Q"
    assert steps(collector)[0]["result"] == "Q"


def test_two_collectors_keep_their_own_traces(tmp_path: Path) -> None:
    one = TraceCollector("one", spool_dir=tmp_path / "one")
    two = TraceCollector("two", spool_dir=tmp_path / "two")
    with one.trace("outer"), two.trace("inner"):
        first = one.current()
        assert isinstance(first, Trace)
        first.step("of one")
    assert [s["name"] for s in steps(one)] == ["of one"]
    assert steps(two) == []
