"""Plugins: agents, rewards, formats, methods, exporters and benchmarks from other packages.

Packages name them as entry points (group `ratchet.formats`, ...), operators by dotted path in a setting
(`RATCHET_FORMATS`, ...). An unusable plugin is reported in the log, by `check` and by `doctor`, and left out.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

logger = logging.getLogger("backend.plugins")


@dataclass(frozen=True)
class Kind:
    attribute: str
    """Attribute to take if the path names a module."""
    register: str
    """`module:function` called with (name, object), which raises ValueError for an invalid object."""


KINDS = {
    "agents": Kind("AGENT", "rl.agents:agent_register"),
    "benchmarks": Kind("BENCHMARK", "rl.recipes.benchmark_tasks:benchmark_register"),
    "exporters": Kind("EXPORTER", "rl.export.artifact:exporter_register"),
    "formats": Kind("FORMAT", "feedback.transfer.formats.order:format_register"),
    "methods": Kind("METHOD", "rl.recipes.methods:method_register"),
    "rewards": Kind("REWARD", "rl.rewards.catalogue:reward_register"),
}
"""Kinds of plugins. Entry points are in the group `ratchet.<kind>`, the setting is `RATCHET_<KIND>`."""


@dataclass(frozen=True)
class Plugin:
    """A named plugin and whether it is in use."""

    kind: str
    name: str
    """Name of the entry point or last part of the dotted path."""
    place: str
    """Where it is named: a setting, or a package with its version."""
    fault: str = ""
    """Why it was left out; empty if it is in use."""
    remark: str = ""
    """Flaw of a plugin that is in use."""
    remedy: str = ""

    @property
    def text(self) -> str:
        """Fault or remark, with the remedy."""
        what = f"was left out: {self.fault}" if self.fault else self.remark
        return f"{self.place} {what}; {self.remedy}"


@dataclass(frozen=True)
class _PluginReference:
    kind: str
    name: str
    path: str
    place: str
    remedy: str


plugins: dict[tuple[str, str], Plugin] = {}
"""(kind, place) -> plugin, for every plugin of this process."""


def plugins_load(kind: str, paths: Sequence[str] = ()) -> None:
    """Import and register the plugins of a kind: those in `paths`, then entry points by name.

    Never raises because of a plugin; `plugins` holds its fault.
    """
    for named in (*_of_setting(kind, paths), *_of_packages(kind)):
        known = plugins.get((kind, named.place))
        if known is None or known.fault:
            plugins[kind, named.place] = _plugin_load(named)


def _of_setting(kind: str, paths: Sequence[str]) -> Iterator[_PluginReference]:
    setting = f"RATCHET_{kind.upper()}"
    for path in paths:
        name = path.replace(":", ".").rpartition(".")[2]
        yield _PluginReference(
            kind, name, path, f"{setting}: {path}", f"correct it, or take it out of {setting}"
        )


def _of_packages(kind: str) -> Iterator[_PluginReference]:
    group = f"ratchet.{kind}"
    for point in sorted(_entry_points().get(group, ()), key=lambda point: (point.name, point.value)):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "a package without a name"
        remedy = f"ask its authors, or: pip uninstall {point.dist.name}" if point.dist else "uninstall it"
        yield _PluginReference(
            kind, point.name, point.value, f"{package}: {group} {point.name} = {point.value}", remedy
        )


@cache
def _entry_points() -> dict[str, list[EntryPoint]]:
    """Group -> entry points. Cached, because it reads every installed package."""
    found = entry_points()
    return {group: list(found.select(group=group)) for group in (f"ratchet.{kind}" for kind in KINDS)}


def _plugin_load(named: _PluginReference) -> Plugin:
    kind = KINDS[named.kind]
    had_torch = "torch" in sys.modules
    try:
        # A plugin may raise anything and call sys.exit.
        try:
            found = object_at(named.path, kind.attribute)
        except (Exception, SystemExit) as error:
            raise ValueError(f"cannot be imported ({_reason(error)})") from error
        module, _, function = kind.register.partition(":")
        getattr(import_module(module), function)(named.name, found)
    except (Exception, SystemExit) as error:
        fault = str(error) if isinstance(error, ValueError) else _reason(error)
        return Plugin(named.kind, named.name, named.place, " ".join(fault.split()), remedy=named.remedy)
    remark = "" if had_torch or "torch" not in sys.modules else "imports torch wherever it is imported"
    remedy = (
        "its authors should import torch inside functions, because web processes do without it"
        if remark
        else ""
    )
    return Plugin(named.kind, named.name, named.place, remark=remark, remedy=remedy)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def object_at(path: str, attribute: str) -> object:
    """The object of `module:NAME`, `module.NAME`, or of a module that defines `attribute`.

    Raises ImportError, AttributeError, and whatever importing the module raises.
    """
    module, colon, name = path.partition(":")
    if not colon:
        try:
            return _attribute_path(import_module(path), attribute)
        except ModuleNotFoundError as error:
            module, _, name = path.rpartition(".")
            if error.name != path or not module:
                raise  # The module exists, but one of its imports does not.
    found: object = import_module(module)
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return _attribute_path(found, attribute)


def _attribute_path(found: object, attribute: str) -> object:
    return getattr(found, attribute) if isinstance(found, ModuleType) else found


def plugin_faults() -> list[Plugin]:
    """Plugins that were left out, then those with a remark."""
    return [one for one in plugins.values() if one.fault] + [one for one in plugins.values() if one.remark]


def left_out(kind: str) -> bool:
    return any(one.kind == kind and one.fault for one in plugins.values())


def plugin_faults_log() -> None:
    """Log each fault and remark once per process."""
    for plugin in plugin_faults():
        if plugin not in _logged_plugins:
            logger.warning("plugin %s", plugin.text)
            _logged_plugins.add(plugin)


_logged_plugins: set[Plugin] = set()


def plugins_check(**_: object) -> list[CheckMessage]:
    """System check: warnings, not errors, so that commands and servers still start."""
    from django.core.checks import Warning as CheckWarning

    return [
        CheckWarning(f"plugin {plugin.text.rpartition('; ')[0]}", hint=plugin.remedy, id="ratchet.W001")
        for plugin in plugin_faults()
    ]
