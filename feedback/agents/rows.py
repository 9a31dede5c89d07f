"""Rows that belong to an agent, in every table of the project: found by the models themselves, not by a list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.db.models import CharField, ForeignKey, Model

from feedback.models import AgentName, ImportBatch

APART: tuple[type[Model], ...] = (AgentName, ImportBatch)
"""Tables that name an agent and hold nothing of it: what it is hashed under, and the record of imports."""


def agent_path(model: type[Model], seen: frozenset[type[Model]] = frozenset()) -> str:
    """The lookup from a model to the slug of the agent its rows belong to: `agent`, `decision__agent`; "" for none."""
    for field in model._meta.concrete_fields:
        if field.name == "agent" and isinstance(field, CharField):
            return "agent"
    for field in model._meta.concrete_fields:
        other = field.related_model
        if not isinstance(field, ForeignKey) or field.null or not isinstance(other, type) or other in seen:
            continue
        if path := agent_path(other, seen | {model}):
            return f"{field.name}__{path}"
    return ""


def agent_models() -> dict[type[Model], str]:
    """Every model whose rows belong to an agent -> the lookup to its slug; those that others point to come last, and
    what is found by way of another table before that."""
    found = {
        model: path for model in apps.get_models() if model not in APART and (path := agent_path(model)) != ""
    }
    return dict(sorted(found.items(), key=lambda item: (-item[1].count("__"), item[0].__name__)))


def rows_of(agent: str) -> Iterator[tuple[type[Model], Any]]:
    """Each model with the agent's rows of it."""
    for model, path in agent_models().items():
        yield model, model._default_manager.order_by().filter(**{path: agent})


def rows_counted(agent: str) -> dict[str, int]:
    """Rows per table, of the tables that hold any."""
    counts = {str(model._meta.verbose_name_plural): rows.count() for model, rows in rows_of(agent)}
    return {name: count for name, count in sorted(counts.items()) if count}


def is_known(agent: str) -> bool:
    """True if any row belongs to the agent."""
    return any(rows.exists() for _, rows in rows_of(agent))


def rows_pointing_in(agent: str) -> list[str]:
    """Rows of other agents that point to rows of this one, in words: they depend on these."""
    models = agent_models()
    found = []
    for model, path in models.items():
        for field in model._meta.concrete_fields:
            if not isinstance(field, ForeignKey) or field.related_model not in models:
                continue
            theirs = models[field.related_model]
            rows = model._default_manager.order_by().filter(**{f"{field.name}__{theirs}": agent})
            if (count := rows.exclude(**{path: agent}).count()) > 0:
                found.append(f"{count} {model._meta.verbose_name_plural} of other agents ({field.name})")
    return found
