"""Template filters that format numbers."""

from __future__ import annotations

from django import template

from rl.models import TrainingRun
from rl.models.runs import method_title
from rl.selectors import Work, work_of

register = template.Library()


@register.filter
def thousands(value: float) -> str:
    """1234567 as 1,234,567."""
    return f"{value:,}"


register.filter("method_name", method_title)


@register.filter
def duration(seconds: float | None) -> str:
    """Seconds in words: 42 s, 3 min 5 s, 2 h 10 min; empty for None."""
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@register.filter
def work(run: TrainingRun) -> Work:
    """What a run in the background does now, and how long it still needs."""
    return work_of(run)


@register.filter
def of(part: float, whole: float) -> str:
    """A coordinate as a share of a drawing's width, for drawings whose text must not shrink with them: 30.5 of 64 is
    47.66%."""
    return f"{100 * part / whole:.2f}%"
