"""The process that runs a model's code and answers calls with plain data.

Nothing here is trusted: the code can change all of it. Only messages leave the process, which the tests' process reads
as data.
"""

from __future__ import annotations

import builtins
from types import FunctionType, ModuleType
from typing import Any

from rl.rewards.sandbox_programs.wire import ITEMS, WireLine, decode, encode

NAME = "answer"
"""Module name of the code; not `__main__`, so that code under that guard does not run."""


class Callback:
    """A function of the tests, called in their process."""

    def __init__(self, host: Host, number: int) -> None:
        self.host, self.number = host, number

    def __call__(self, *args: object) -> object:
        return self.host.call_back(self.number, args)


class Host:
    """Serves the calls of one tests' process until it hangs up."""

    def __init__(self, line: WireLine, code: str) -> None:
        self.line = line
        self.objects: dict[int, object] = {}
        self.module = ModuleType(NAME)
        self.fault: list[str] | None = None
        try:
            exec(compile(code, "answer.py", "exec"), vars(self.module))  # noqa: S102
        except BaseException as error:
            self.fault = _error(error)

    def serve(self) -> None:
        while True:
            try:
                request = self.line.receive()
            except EOFError:
                return
            self.line.send(self._reply(request))

    def call_back(self, number: int, args: tuple[object, ...]) -> object:
        self.line.send({"callback": number, "args": [encode(value, self._handle) for value in args]})
        reply = self.line.receive()
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return decode(reply["value"], self._resolve)

    def _reply(self, asked: dict[str, Any]) -> dict[str, object]:
        try:
            if self.fault is not None:
                return {"n": asked["n"], "error": self.fault}
            args = [decode(value, self._resolve) for value in asked["args"]]
            before = asked["args"]
            value = self._finish(asked, args)
            reply = {"n": asked["n"], "value": encode(value, self._handle)}
            if value is None:
                # a function that returns nothing may have changed its arguments in place
                after = [encode(item, self._handle) for item in args]
                reply["changed"] = [[i, item] for i, item in enumerate(after) if item != before[i]]
            return reply
        except BaseException as error:
            return {"n": asked["n"], "error": _error(error)}

    def _finish(self, asked: dict[str, Any], args: list[Any]) -> Any:
        action, target = asked["do"], asked["target"]
        if action == "defined":
            return [name for name, value in vars(self.module).items() if isinstance(value, FunctionType)]
        if isinstance(target, str):
            if not hasattr(self.module, target):
                raise NameError(f"name {target!r} is not defined")
            callee = getattr(self.module, target)
        else:
            callee = self.objects[target]
        if action == "call":
            named = {key: decode(value, self._resolve) for key, value in asked.get("named", {}).items()}
            return callee(*args, **named)
        if action == "attribute":
            return getattr(callee, args[0])
        if action == "set":
            return setattr(callee, args[0], args[1])
        if action == "item":
            return callee[args[0]]
        if action == "text":
            return str(callee)
        if action == "length":
            return len(callee)
        if action == "items":
            return [item for _, item in zip(range(ITEMS), callee, strict=False)]
        raise ValueError(f"unknown request {action!r}")

    def _handle(self, value: Any) -> dict[str, object]:
        if hasattr(value, "__next__") or type(value).__name__ in (
            "range",
            "dict_keys",
            "dict_values",
            "dict_items",
        ):
            return {"items": [encode(i, self._handle) for _, i in zip(range(ITEMS), value, strict=False)]}
        number = id(value)
        self.objects[number] = value
        return {"object": number}

    def _resolve(self, kind: str, said: Any) -> object:
        if kind == "object":
            return self.objects[said]
        if kind == "builtin":
            return getattr(builtins, said)
        if kind == "callback":
            return Callback(self, said)
        if kind == "items":
            return iter([decode(item, self._resolve) for item in said])
        raise ValueError(f"unknown kind {kind!r}")


def _error(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)[:300]]


def run(program: dict[str, Any], source: int, target: int) -> None:
    Host(WireLine(source, target), program["code"]).serve()
