"""The order in which formats are asked whether a row is theirs: the most specific keys first.

A new format goes into the section it belongs to; within a section, before every format whose keys its rows have, too.
"""

from __future__ import annotations

from types import ModuleType

from feedback.transfer.formats import (
    alpacaeval,
    arena,
    argilla,
    capybara,
    deepeval,
    feedback_collector,
    flywheel,
    helicone,
    helpsteer,
    hh,
    label_studio,
    langfuse,
    langfuse_traces,
    langsmith,
    librechat,
    litellm,
    llamafactory,
    llamafactory_v1,
    mlflow,
    mtbench,
    nectar,
    oasst,
    open_webui,
    open_webui_chats,
    openai,
    openai_evals,
    openai_stored,
    opik,
    otlp,
    pandalm,
    phoenix,
    portkey,
    promptfoo,
    ratchet,
    scored_pairs,
    shp,
    simulation,
    table,
    tensorzero,
    trl,
    ultrafeedback,
    vw,
    weave,
)
from feedback.transfer.formats.base import Format

OWN: tuple[ModuleType, ...] = (ratchet, feedback_collector)
"""Formats that we and our collector write."""

TELEMETRY: tuple[ModuleType, ...] = (
    otlp,
    mlflow,
    opik,
    promptfoo,
    deepeval,
    openai_evals,
    openai_stored,
    weave,
    langsmith,
    phoenix,
)
"""Traces, spans and evaluations of observability tools."""

LOGS: tuple[ModuleType, ...] = (helicone, litellm, portkey, flywheel)
"""Requests and responses of gateways."""

CHOICES: tuple[ModuleType, ...] = (vw,)
"""Choices among listed actions."""

APPLICATIONS: tuple[ModuleType, ...] = (
    open_webui,
    open_webui_chats,
    librechat,
    langfuse_traces,
    langfuse,
    tensorzero,
    oasst,
    label_studio,
    argilla,
)
"""Exports of chat and labelling applications."""

DATA_SETS: tuple[ModuleType, ...] = (
    mtbench,
    arena,
    helpsteer,
    capybara,
    shp,
    ultrafeedback,
    nectar,
    alpacaeval,
    scored_pairs,
)
"""Published data sets with columns of their own."""

TRAINING: tuple[ModuleType, ...] = (pandalm, hh, llamafactory_v1, openai, llamafactory, trl)
"""Files that training programs read."""

PLAIN: tuple[ModuleType, ...] = (simulation, table)
"""Rows of a prompt, a response and what was said of it, whatever else they hold: last."""

ORDER: tuple[Format, ...] = tuple(
    module.FORMAT
    for section in (OWN, TELEMETRY, LOGS, CHOICES, APPLICATIONS, DATA_SETS, TRAINING, PLAIN)
    for module in section
)
