"""The operator's YAML file of knobs (RATCHET_CONFIG); unknown keys and invalid values are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl.recipes import AB_TESTING_KNOBS, ONLINE_LEARNING_CONFIG, RecipeError
from rl.recipes.methods import METHODS, PLANS, policy_methods

WRAPPER = "rlhf"
"""Optional top-level key around everything."""

SWITCHES = ("enabled", "base_model")
"""Top-level keys besides the sections."""

SCOPES = ("ingest", "rate", "read", "operate")
LEARNER_CHOICES: dict[str, Callable[[], tuple[str, ...]]] = {
    "method": lambda: ("auto", *PLANS, *policy_methods()),
    "start_from": lambda: ("base", "champion"),
    "gate": lambda: ("champion", "challenger", "none"),
}
"""Knob of `continuous_learning` -> allowed values."""


class OperatorFileError(ValueError):
    """The file is unreadable, or a key or value is invalid."""


@dataclass(frozen=True)
class OperatorFile:
    """Values of the file."""

    sections: dict[str, Mapping[str, object]] = field(default_factory=dict)
    """Section -> {knob: value}, without base models."""
    base_models: dict[str, str] = field(default_factory=dict)
    """Method or `continuous_learning` -> base model."""
    base_model: str = ""
    """Default base model; empty if not set."""
    enabled: bool | None = None
    """Whether agents retrain automatically; None if not set."""


class _Strict(yaml.SafeLoader):
    """Refuses repeated keys, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                raise OperatorFileError(
                    f"{key.value} is repeated in line {key.start_mark.line + 1}: remove one of them"
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def operator_file(path: str, *, methods_missing: bool = False) -> OperatorFile:
    """Read and check the file; an empty path is an empty file. Raises OperatorFileError.

    methods_missing: a method plugin failed to load, so ignore unknown sections, which may be its.
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


def operator_settings(content: object, *, methods_missing: bool = False) -> OperatorFile:
    """Settings of a parsed file: sections at the top level or all below `rlhf`. Raises OperatorFileError."""
    if not isinstance(content, dict):
        raise OperatorFileError(
            f"expected sections of knobs ({', '.join(section_checks())}), found {type(content).__name__}"
        )
    if WRAPPER in content:
        if beside := sorted(map(str, set(content) - {WRAPPER})):
            raise OperatorFileError(f"{beside[0]} is outside {WRAPPER}: put everything below {WRAPPER}")
        content = content[WRAPPER] or {}
        if not isinstance(content, dict):
            raise OperatorFileError(f"{WRAPPER}: expected sections of knobs, found {type(content).__name__}")
    sections: dict[str, Mapping[str, object]] = {}
    base_models: dict[str, str] = {}
    checks = section_checks()
    for name, knobs in content.items():
        if name in SWITCHES or (methods_missing and name not in checks):
            continue
        if name not in checks:
            raise OperatorFileError(
                f"no section {name!r}; there are {', '.join(checks)}, and the keys {', '.join(SWITCHES)}"
            )
        knobs = {} if knobs is None else knobs  # All knobs are commented out.
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


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise OperatorFileError(f"{key}: expected a Hugging Face name or a folder, found {value!r}")
    return value


def _check_knobs(
    section: str, knobs: Mapping[str, object], known: Mapping[str, object] | tuple[str, ...]
) -> None:
    if unknown := sorted(map(str, set(knobs) - set(known))):
        raise OperatorFileError(f"{section}: no knob {unknown[0]!r}; there are {', '.join(known)}")


def _recipe(section: str, knobs: Mapping[str, object]) -> None:
    """Check that at least one preset of the method accepts the knobs."""
    fault: RecipeError | None = None
    for preset in METHODS[section].presets.values():
        try:
            preset.with_knobs(**knobs)
        except RecipeError as error:
            fault = fault or error
        else:
            return
    raise OperatorFileError(f"{section}: {fault}")


def _share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 32_767


FEEDBACK: dict[str, tuple[Callable[[object], bool], str]] = {
    "collection_rate": (_share, "a share from 0 to 1"),
    "ratings_wanted": (_count, "a whole number of at least 1"),
    "overlap_share": (_share, "a share from 0 to 1"),
    "overlap_ratings": (_count, "a whole number of at least 1"),
    **{
        f"throttle_{scope}": (
            lambda value: bool(re.fullmatch(r"[1-9]\d*/(s|sec|min|hour|day)", str(value))),
            "a rate such as 600/min",
        )
        for scope in (*SCOPES, "feedback_token", "feedback_address")
    },
}
"""Knob of `feedback` -> (check of a value, what is allowed)."""


def _feedback(section: str, knobs: Mapping[str, object]) -> None:
    _check_knobs(section, knobs, FEEDBACK)
    for name, value in knobs.items():
        allowed, words = FEEDBACK[name]
        if not allowed(value):
            raise OperatorFileError(f"{section}.{name}: expected {words}, found {value!r}")


def _learner(section: str, knobs: Mapping[str, Any]) -> None:
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


def _experiments(section: str, knobs: Mapping[str, object]) -> None:
    _check_knobs(section, knobs, AB_TESTING_KNOBS)  # Values are checked when an experiment is created.


def section_checks() -> dict[str, Callable[[str, Mapping[str, object]], None]]:
    """Section -> check of its knobs; each method has a section."""
    return {
        "feedback": _feedback,
        **dict.fromkeys(METHODS, _recipe),
        "continuous_learning": _learner,
        "ab_testing": _experiments,
    }
