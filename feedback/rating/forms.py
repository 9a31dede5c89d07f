"""Forms of the rating page: parsed here, validated by feedback.services."""

from __future__ import annotations

import uuid
from typing import Any

from django import forms
from django.http import QueryDict

from feedback.models import Decision, Preference, Thumb

STARS = ("1", "2", "3", "4", "5")
ACCEPTING = {"accept-up": Thumb.UP, "accept-down": Thumb.DOWN}
"""Buttons that accept a suggestion -> the thumb that was shown on them."""


def tags_sent(sent: Any) -> list[str]:
    """The tags of a form: those ticked, and those written with commas between."""
    ticked = sent.getlist("tag") if isinstance(sent, QueryDict) else []
    written = str(sent.get("other_tags", "")).split(",")
    return [*ticked, *(tag.strip() for tag in written if tag.strip())]


class SentForm(forms.Form):
    """Says what is wrong with itself in one line."""

    def fault(self) -> str:
        return "; ".join(f"{name}: {' '.join(map(str, faults))}" for name, faults in self.errors.items())


class ComparisonForm(SentForm):
    """One press of a button on the page of pairs; the decisions are looked up by the view.

    id: made with the page, so that a double click or a resend is stored once.
    """

    id = forms.UUIDField()
    preference = forms.ChoiceField(choices=Preference.choices)
    notes = forms.CharField(required=False)

    def facts(self) -> dict[str, Any]:
        """Keyword arguments of comparison_submit, without the decisions and the rater. Only for a valid form."""
        return {name: self.cleaned_data[name] for name in ("id", "preference", "notes")}


class RatingForm(SentForm):
    """One press of a button on the rating page.

    id: made with the page, so that a double click or a resend is stored once. verdict: the button pressed. tag (any
    number of them), other_tags (comma separated), notes, correction (a text, or one of the listed responses): what
    was filled in besides.
    """

    id = forms.UUIDField()
    decision = forms.UUIDField()
    verdict = forms.ChoiceField(
        choices=[(v, v) for v in ("up", "down", *STARS, "correct", "save", *ACCEPTING)]
    )
    other_tags = forms.CharField(required=False, max_length=2000)
    notes = forms.CharField(required=False)
    correction = forms.CharField(required=False, strip=False)

    def facts(self, decision: Decision) -> dict[str, Any]:
        """Keyword arguments of rating_submit, without the rater. Only for a valid form."""
        verdict = self.cleaned_data["verdict"]
        correction = self.cleaned_data["correction"].replace("\r\n", "\n")
        changed = bool(correction.strip()) and correction != decision.response.replace("\r\n", "\n")
        return {
            "id": self.cleaned_data["id"],
            "decision": decision,
            "thumb": ACCEPTING.get(verdict, verdict if verdict in Thumb.values else ""),
            "stars": int(verdict) if verdict in STARS else None,
            "correction": correction if changed else None,
            "tags": tags_sent(self.data),
            "notes": self.cleaned_data["notes"],
        }


def rating_id() -> uuid.UUID:
    """The id a page carries for the rating that may come back from it."""
    return uuid.uuid4()
