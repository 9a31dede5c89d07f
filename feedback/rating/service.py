"""Forms and writers behind the rating pages: store a rating and its consequences, undo the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms
from django.http import QueryDict

from feedback.models import Comparison, Decision, Preference, Rating, Thumb
from feedback.rating.queue import lease_release, lease_take
from feedback.rating.suggestions import suggestion_of, suggestion_reopen, suggestion_resolve
from feedback.services import (
    FeedbackConflict,
    FeedbackRefused,
    WriteResult,
    comparison_withdraw,
    rating_submit,
    rating_withdraw,
)

STARS = ("1", "2", "3", "4", "5")
ACCEPTING = {"accept-up": Thumb.UP, "accept-down": Thumb.DOWN}
"""Button that accepts a suggestion -> the thumb it shows."""


def tags_sent(sent: Any) -> list[str]:
    """Tags of a form: the ticked ones and the comma-separated ones."""
    ticked = sent.getlist("tag") if isinstance(sent, QueryDict) else []
    written = str(sent.get("other_tags", "")).split(",")
    return [*ticked, *(tag.strip() for tag in written if tag.strip())]


class SentForm(forms.Form):
    def fault(self) -> str:
        """Every error of the form on one line."""
        return "; ".join(f"{name}: {' '.join(map(str, faults))}" for name, faults in self.errors.items())


class ComparisonForm(SentForm):
    """A button pressed on the page of pairs.

    The page sets `id`, so that a double click or a resend is stored once.
    """

    id = forms.UUIDField()
    preference = forms.ChoiceField(choices=Preference.choices)
    notes = forms.CharField(required=False)

    def facts(self) -> dict[str, Any]:
        """Keyword arguments of `comparison_submit` besides the decisions and the rater. Valid forms only."""
        return {name: self.cleaned_data[name] for name in ("id", "preference", "notes")}


class RatingForm(SentForm):
    """A button (`verdict`) pressed on the rating page, with its inputs.

    The page sets `id`, so that a double click or a resend is stored once. Inputs are `tag` (repeated), `other_tags`
    (comma separated), `correction` (a text or a listed response) and `notes`.
    """

    id = forms.UUIDField()
    decision = forms.UUIDField()
    verdict = forms.ChoiceField(
        choices=[(v, v) for v in ("up", "down", *STARS, "correct", "save", *ACCEPTING)]
    )
    other_tags = forms.CharField(required=False, max_length=2000)
    correction = forms.CharField(required=False, strip=False)
    notes = forms.CharField(required=False)

    def facts(self, decision: Decision) -> dict[str, Any]:
        """Keyword arguments of `rating_submit` besides the rater. Valid forms only."""
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


def form_values(last: Rating | None) -> dict[str, Any]:
    """Form values of a rater's newest rating; of a withdrawn one they are the earlier rating's, without verdict."""
    withdrawn = last is not None and last.withdrawn
    if last is not None and last.withdrawn:
        last = last.supersedes
    if last is None:
        return {"tags": [], "correction": "", "verdict": "", "notes": ""}
    return {
        "notes": last.notes,
        "tags": list(last.tags),
        "correction": last.correction or "",
        "verdict": "" if withdrawn else str(last.stars or last.thumb),
    }


class SuggestionChanged(FeedbackRefused):
    """The accepted suggestion was resolved or replaced after the page was shown."""


def rating_give(rater: str, decision: Decision, verdict: str, facts: dict[str, Any]) -> WriteResult:
    """Store a rating, resolve the suggestion it answers, and release the lease.

    Args:
        verdict: The button of the rating page.
        facts: Keyword arguments of `rating_submit` besides the rater.

    Raises FeedbackRefused, SuggestionChanged, or FeedbackConflict if the page was sent before with another button.
    """
    if verdict == "correct" and facts["correction"] is None:
        raise FeedbackRefused("The correction equals the response: change the text, then save it")
    accepted = verdict in ACCEPTING
    if accepted:
        suggested = suggestion_of(decision)
        if suggested is None or suggested.thumb != ACCEPTING[verdict]:
            raise SuggestionChanged(
                "The suggestion changed since this page was shown: rate the decision here"
            )
    written = rating_submit(rater=rater, **facts)
    lease_release(rater, decision.pk)
    if written.created:
        suggestion_resolve(decision, written.row, accepted=accepted)
    return written


def rating_undo(rater: str, ids: Sequence[str]) -> tuple[Rating | None, list[str]]:
    """Withdraw the last of these ratings that still stands, and lease its decision to the rater again.

    Returns (rating, ids before it), or (None, []) if none of them stands and is this rater's.
    """
    earlier = list(ids)
    while earlier:
        rating = Rating.objects.filter(pk=earlier.pop(), rater=rater).select_related("decision").first()
        if rating is None:
            continue
        try:
            rating_withdraw(rating)
        except FeedbackConflict:
            continue  # Replaced or withdrawn in another window: undo the one before.
        suggestion_reopen(rating)
        lease_take(rater, rating.decision_id)
        return rating, earlier
    return None, []


def comparison_undo(rater: str, ids: Sequence[str]) -> tuple[Comparison | None, list[str]]:
    """As `rating_undo`, for comparisons."""
    earlier = list(ids)
    while earlier:
        rows = Comparison.objects.filter(pk=earlier.pop(), rater=rater).select_related("left", "right")
        comparison = rows.first()
        if comparison is None:
            continue
        try:
            comparison_withdraw(comparison)
        except FeedbackConflict:
            continue
        return comparison, earlier
    return None, []
