"""The order in which formats are asked whether a row is theirs: the most specific keys first.

A new format goes into the section it belongs to; within a section, before every format whose keys its rows have, too.
"""

from __future__ import annotations

from types import ModuleType

from feedback.formats import (
    argilla,
    feedback_collector,
    hh,
    label_studio,
    langfuse,
    librechat,
    llamafactory,
    oasst,
    open_webui,
    openai,
    pandalm,
    ratchet,
    simulation,
    tensorzero,
    trl,
    vw,
)
from feedback.formats.base import Format

OWN: tuple[ModuleType, ...] = (ratchet, feedback_collector)
"""What we and our collector write."""

TELEMETRY: tuple[ModuleType, ...] = ()
"""Traces, spans and evaluations of observability tools."""

LOGS: tuple[ModuleType, ...] = ()
"""Requests and responses of gateways."""

CHOICES: tuple[ModuleType, ...] = (vw,)
"""Choices among listed actions."""

APPLICATIONS: tuple[ModuleType, ...] = (
    open_webui,
    librechat,
    langfuse,
    tensorzero,
    oasst,
    label_studio,
    argilla,
)
"""Exports of chat and labelling applications."""

DATA_SETS: tuple[ModuleType, ...] = ()
"""Published data sets with columns of their own."""

TRAINING: tuple[ModuleType, ...] = (pandalm, hh, openai, llamafactory, trl)
"""Files that training programs read."""

PLAIN: tuple[ModuleType, ...] = (simulation,)
"""Rows of a prompt, a response and what was said of it, whatever else they hold: last."""

ORDER: tuple[Format, ...] = tuple(
    module.FORMAT
    for section in (OWN, TELEMETRY, LOGS, CHOICES, APPLICATIONS, DATA_SETS, TRAINING, PLAIN)
    for module in section
)
