"""The order in which formats are asked whether a row is theirs: the most specific keys first.

A new format goes into the section it belongs to; within a section, before every format whose keys its rows have, too.
Those of plugins (`backend.plugins`) are asked after all that have names of their own, before training files and tables.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from feedback.transfer.formats.arenas import ARENA, MTBENCH
from feedback.transfer.formats.base import Format
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.chats import LIBRECHAT, OPEN_WEBUI, OPEN_WEBUI_CHATS
from feedback.transfer.formats.data_sets import (
    ALPACAEVAL,
    CAPYBARA,
    HELPSTEER,
    NECTAR,
    SCORED_PAIRS,
    SHP,
    ULTRAFEEDBACK,
)
from feedback.transfer.formats.evaluations import DEEPEVAL, OPENAI_EVALS, PROMPTFOO
from feedback.transfer.formats.gateways import FLYWHEEL, HELICONE, LITELLM, OPENAI_STORED, PORTKEY
from feedback.transfer.formats.label_studio import LABEL_STUDIO
from feedback.transfer.formats.labelling import ARGILLA
from feedback.transfer.formats.langfuse import LANGFUSE, LANGFUSE_TRACES
from feedback.transfer.formats.llamafactory import LLAMAFACTORY, LLAMAFACTORY_V1
from feedback.transfer.formats.mlflow import MLFLOW
from feedback.transfer.formats.otlp import OTLP
from feedback.transfer.formats.own_tools import FEEDBACK_COLLECTOR, SIMULATION
from feedback.transfer.formats.pair_files import HH, OASST, PANDALM
from feedback.transfer.formats.ratchet import RATCHET
from feedback.transfer.formats.records import FormatRefused, Record
from feedback.transfer.formats.spans import PHOENIX
from feedback.transfer.formats.table import TABLE
from feedback.transfer.formats.tensorzero import TENSORZERO
from feedback.transfer.formats.traces import LANGSMITH, OPIK, WEAVE
from feedback.transfer.formats.training_files import OPENAI, TRL
from feedback.transfer.formats.vw import VW
from feedback.transfer.formats.writers import RowShape, View

OWN_FORMATS = (RATCHET, FEEDBACK_COLLECTOR)
"""Formats that we and our collector write."""

TELEMETRY = (
    OTLP,
    MLFLOW,
    OPIK,
    PROMPTFOO,
    DEEPEVAL,
    OPENAI_EVALS,
    OPENAI_STORED,
    WEAVE,
    LANGSMITH,
    PHOENIX,
    LANGFUSE_TRACES,
    LANGFUSE,
)
"""Traces, spans and evaluations of observability tools."""

LOGS = (HELICONE, LITELLM, PORTKEY, FLYWHEEL)
"""Requests and responses of gateways."""

CHOICES = (VW,)
"""Choices among listed actions."""

APPLICATIONS = (OPEN_WEBUI, OPEN_WEBUI_CHATS, LIBRECHAT, TENSORZERO, OASST, LABEL_STUDIO, ARGILLA)
"""Exports of chat and labelling applications."""

DATA_SETS = (MTBENCH, ARENA, HELPSTEER, CAPYBARA, SHP, ULTRAFEEDBACK, NECTAR, ALPACAEVAL, SCORED_PAIRS)
"""Published data sets with columns of their own."""

TRAINING = (PANDALM, HH, LLAMAFACTORY_V1, OPENAI, LLAMAFACTORY, TRL)
"""Files that training programs read."""

PLAIN = (SIMULATION, TABLE)
"""Rows of a prompt, a response and what was said of it, whatever else they hold: last."""

ORDER: list[Format] = [
    *OWN_FORMATS,
    *TELEMETRY,
    *LOGS,
    *CHOICES,
    *APPLICATIONS,
    *DATA_SETS,
    *TRAINING,
    *PLAIN,
]
"""Every format, in the order in which they are asked."""

FORMATS: dict[str, Format] = {format.name: format for format in ORDER}

SHAPES: dict[str, RowShape] = {shape.name: shape for format in ORDER for shape in format.shapes}
"""Every kind of file that can be written."""

READ_AS: dict[str, Format] = {shape.name: format for format in ORDER for shape in format.shapes} | FORMATS
"""Every name that a file is read under: what was written under a name is read under it, too."""

NAME = r"[a-z0-9][a-z0-9_-]{0,31}"

logger = logging.getLogger("feedback.transfer.formats")


def format_register(name: str, found: object) -> None:
    """Enter a format from outside (`backend.plugins`). Raises ValueError where it is none, or a name of it is taken."""
    if not isinstance(found, Format):
        raise ValueError(f"expected a Format (feedback.transfer.formats.base), found {found!r:.80}")
    if found.name in FORMATS and _is_format(FORMATS[found.name], found):
        return
    for shape in found.shapes:
        if not isinstance(shape, RowShape) or not set(shape.views) <= set(View):
            raise ValueError(f"expected shapes of RowShape with views of View, found {shape!r:.80}")
    if found.shapes and found.shapes[0].name != found.name:
        raise ValueError(
            f"expected the first shape to have the name {found.name!r}, found {found.shapes[0].name!r}"
        )
    for one in dict.fromkeys((found.name, *(shape.name for shape in found.shapes))):
        if not re.fullmatch(NAME, one):
            raise ValueError(f"expected a name of small letters, digits, _ and -, found {one!r}")
        if one in READ_AS or one == "auto":
            raise ValueError(f"the name {one!r} is taken by another format: choose another name")
    guarded = replace(
        found,
        recognises=_guard_recognises(found.name, found.recognises),
        read=_guard_read(found.name, found.read),
    )
    ORDER.insert(ORDER.index(TRAINING[0]), guarded)
    FORMATS[found.name] = guarded
    SHAPES.update({shape.name: shape for shape in found.shapes})
    READ_AS.update(dict.fromkeys((found.name, *(shape.name for shape in found.shapes)), guarded))


def _is_format(known: Format, found: Format) -> bool:
    """True if a format is the one that was entered, whose functions are guarded since."""
    return replace(known, recognises=found.recognises, read=found.read) == found


def _guard_recognises(name: str, recognises: Callable[[JsonObject], bool]) -> Callable[[JsonObject], bool]:
    """`recognises`, which is asked about rows of every format: where it fails, the row is not its own."""
    seen: set[str] = set()

    def recognises_safely(row: JsonObject) -> bool:
        try:
            return bool(recognises(row))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if reason not in seen:  # once, not once for each row of every import
                logger.warning("format %s cannot say whether a row is its own (%s)", name, reason)
                seen.add(reason)
            return False

    return recognises_safely


Read = Callable[[Path, Path | None], Iterator[Record]]


def _guard_read(name: str, read: Read) -> Read:
    """`read`, whose own mistakes refuse the file: nothing of it is stored, and the rest of the program goes on."""

    def reads_safely(path: Path, ratings_path: Path | None) -> Iterator[Record]:
        try:
            yield from read(path, ratings_path)
        except FormatRefused:
            raise
        except Exception as error:
            logger.exception("the plugin's format %s failed", name)
            raise FormatRefused(
                f"{path}: the plugin that reads {name} made a mistake ({type(error).__name__}: {error}); nothing was "
                "imported. Mend the plugin, or name another format"
            ) from error

    return reads_safely
