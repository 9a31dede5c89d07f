"""Read the operator's YAML file of knobs (RATCHET_CONFIG) and check every key: what has no effect is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl.recipes import AB_TESTING_KNOBS, ONLINE_LEARNING_CONFIG, RecipeError
from rl.recipes.methods import METHODS, RLHF, policy_methods

WRAPPER = "rlhf"
"""One top key below which everything may stand."""

SWITCHES = ("enabled", "base_model")
"""Keys beside the sections."""

SCOPES = ("ingest", "rate", "read", "operate")
LEARNER_CHOICES: dict[str, Callable[[], tuple[str, ...]]] = {
    "method": lambda: ("auto", RLHF, *policy_methods()),
    "start_from": lambda: ("base", "champion"),
    "gate": lambda: ("champion", "challenger", "none"),
}
"""Knob of `continuous_learning` -> the values it may have."""


class OperatorFileError(ValueError):
    """A file that cannot be read, or a key or value in it that means nothing; the message names the key."""


@dataclass(frozen=True)
class OperatorFile:
    """Values of the file, by where they count."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Section -> {knob: value}, without the base models."""
    base_models: dict[str, str] = field(default_factory=dict)
    """Method or `continuous_learning` -> the base model trained there."""
    base_model: str = ""
    """Base model where nothing else names one; empty where the file does not say."""
    enabled: bool | None = None
    """Switch for agents that retrain by themselves; None where the file does not say."""


class _Strict(yaml.SafeLoader):
    """Reads plain YAML; a key that stands there twice is refused, where YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                raise OperatorFileError(
                    f"{key.value} stands there twice, again in line {key.start_mark.line + 1}"
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def operator_file(path: str, *, methods_missing: bool = False) -> OperatorFile:
    """The file's content, checked; an empty path is an empty file. Raises OperatorFileError.

    methods_missing: a plugin with a method was left out, so that a section nobody knows may be that method's: it counts
    for nothing and stops nothing.
    """
    if not path:
        return OperatorFile()
    try:
        found = yaml.load(Path(path).expanduser().read_text("utf-8"), _Strict) or {}  # noqa: S506 - a SafeLoader
        return operator_settings(found, methods_missing=methods_missing)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OperatorFileError(f"RATCHET_CONFIG ({path}) must be a readable YAML file: {error}") from error
    except OperatorFileError as error:
        raise OperatorFileError(f"RATCHET_CONFIG ({path}): {error}") from error


def operator_settings(content: Any, *, methods_missing: bool = False) -> OperatorFile:
    """The settings in a parsed file: sections at the top, or all of them below `rlhf`. Raises OperatorFileError."""
    if not isinstance(content, dict):
        raise OperatorFileError(
            f"expected sections of knobs ({', '.join(section_checks())}), found {type(content).__name__}"
        )
    if WRAPPER in content:
        if beside := sorted(map(str, set(content) - {WRAPPER})):
            raise OperatorFileError(f"{beside[0]} stands beside {WRAPPER}: put everything below {WRAPPER}")
        content = content[WRAPPER] or {}
        if not isinstance(content, dict):
            raise OperatorFileError(f"{WRAPPER}: expected sections of knobs, found {type(content).__name__}")
    sections: dict[str, dict[str, Any]] = {}
    base_models: dict[str, str] = {}
    checks = section_checks()
    for name, knobs in content.items():
        if name in SWITCHES or (methods_missing and name not in checks):
            continue
        if name not in checks:
            raise OperatorFileError(
                f"no section {name!r}; there are {', '.join(checks)}, and the keys {', '.join(SWITCHES)}"
            )
        knobs = {} if knobs is None else knobs  # a section whose knobs are commented out
        if not isinstance(knobs, dict):
            raise OperatorFileError(f"{name}: expected knobs, found {type(knobs).__name__}")
        own = dict(knobs)
        if "base_model" in own and name != "linear" and (name in METHODS or name == "continuous_learning"):
            base_models[name] = _text(f"{name}.base_model", own.pop("base_model"))
        checks[name](name, own)
        sections[name] = own
    enabled = content.get("enabled")
    if enabled is not None and not isinstance(enabled, bool):
        raise OperatorFileError(f"enabled: expected true or false, found {enabled!r}")
    base_model = _text("base_model", content["base_model"]) if "base_model" in content else ""
    return OperatorFile(sections, base_models, base_model, enabled)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise OperatorFileError(f"{key}: expected a Hugging Face name or a folder, found {value!r}")
    return value


def _check_knobs(section: str, knobs: Mapping[str, Any], known: Mapping[str, Any] | tuple[str, ...]) -> None:
    if unknown := sorted(map(str, set(knobs) - set(known))):
        raise OperatorFileError(f"{section}: no knob {unknown[0]!r}; there are {', '.join(known)}")


def _recipe(section: str, knobs: Mapping[str, Any]) -> None:
    """A method's knobs: known by name, and allowed by at least one preset, over which they are laid."""
    fault: RecipeError | None = None
    for preset in METHODS[section].presets.values():
        try:
            preset.with_knobs(**knobs)
        except RecipeError as error:
            fault = fault or error
        else:
            return
    raise OperatorFileError(f"{section}: {fault}")


def _share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 32_767


FEEDBACK: dict[str, tuple[Callable[[Any], bool], str]] = {
    "collection_rate": (_share, "a share from 0 to 1"),
    "ratings_wanted": (_count, "a whole number of at least 1"),
    "overlap_share": (_share, "a share from 0 to 1"),
    "overlap_ratings": (_count, "a whole number of at least 1"),
    "aggregation": (lambda value: value in ("majority", "dawid_skene"), "majority or dawid_skene"),
    **{
        f"throttle_{scope}": (
            lambda value: bool(re.fullmatch(r"[1-9]\d*/(s|sec|min|hour|day)", str(value))),
            "a rate such as 600/min",
        )
        for scope in SCOPES
    },
}
"""Knob of `feedback` -> whether a value is allowed, and what is."""


def _feedback(section: str, knobs: Mapping[str, Any]) -> None:
    _check_knobs(section, knobs, FEEDBACK)
    for name, value in knobs.items():
        allowed, words = FEEDBACK[name]
        if not allowed(value):
            raise OperatorFileError(f"{section}.{name}: expected {words}, found {value!r}")


def _learner(section: str, knobs: Mapping[str, Any]) -> None:
    """The learner's knobs: of the type of their default, and one of the choices where there are such."""
    _check_knobs(section, knobs, {**ONLINE_LEARNING_CONFIG, "base_model": ""})
    for name, value in knobs.items():
        default = ONLINE_LEARNING_CONFIG[name]
        if choices := LEARNER_CHOICES.get(name):
            fits, words = value in choices(), f"one of {', '.join(choices())}"
        elif isinstance(default, bool):
            fits, words = isinstance(value, bool), "true or false"
        elif name == "replay_share":
            fits, words = _share(value), "a share from 0 to 1"
        elif isinstance(default, int):
            whole = isinstance(value, int) and not isinstance(value, bool)
            fits, words = whole and value >= (0 if name.startswith("keep_") else 1), "a whole number above 0"
        else:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits, words = number and value > 0, "a number above 0"
        if not fits:
            raise OperatorFileError(f"{section}.{name}: expected {words}, found {value!r}")


def _experiments(section: str, knobs: Mapping[str, Any]) -> None:
    _check_knobs(section, knobs, AB_TESTING_KNOBS)  # their values are checked with the experiment they make


def section_checks() -> dict[str, Callable[[str, Mapping[str, Any]], None]]:
    """Section -> the check of its knobs; each method has a section."""
    return {
        "feedback": _feedback,
        **dict.fromkeys(METHODS, _recipe),
        "continuous_learning": _learner,
        "ab_testing": _experiments,
    }
