"""The form for people who hold a feedback token: linked from e-mails, open to everyone, and it shows nothing of the
decision."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods

from backend import limits
from backend.http import body_refused
from backend.rest.errors import STATUSES, RequestRefused
from feedback.accounts.feedback_tokens import APP_USER, token_read, token_wait
from feedback.models import Thumb
from feedback.rating.views import SentForm
from feedback.recording.recorder import recorded_or_never
from feedback.services import rating_submit
from feedback.storage.validation import FeedbackRefused


class FeedbackForm(SentForm):
    """Body of the form. `id` makes a double click one rating."""

    id = forms.UUIDField()
    thumb = forms.ChoiceField(choices=[("", ""), *Thumb.choices], required=False)
    correction = forms.CharField(required=False)
    notes = forms.CharField(required=False)

    def facts(self) -> dict[str, Any]:
        """Keyword arguments of `rating_submit` besides the decision and the rater. Valid forms only."""
        return {**self.cleaned_data, "correction": self.cleaned_data["correction"] or None}


@dataclass(frozen=True)
class Problem:
    """Why nothing was stored."""

    status: int
    text: str
    wait_s: int = 0


@csrf_exempt  # the token in the address is the proof, and a form in a mail program has no cookie
@never_cache
@sensitive_variables("token")
@require_http_methods(["GET", "HEAD", "POST"])
def feedback(request: HttpRequest, token: str) -> HttpResponse:
    """Show the form, and store what it sends. GET stores nothing, because mail programs open links for previews."""
    length = request.META.get("CONTENT_LENGTH") or "0"
    if not length.isdigit() or int(length) > limits.FEEDBACK_BYTES:
        return body_refused(f"The form is larger than {limits.FEEDBACK_BYTES >> 10} KiB.")
    try:
        decision = token_read(token)
    except RequestRefused as refusal:
        code = str(refusal.get_codes())
        return render(request, "feedback/feedback_form.html", {"gone": code}, status=refusal.status_code)
    if request.method != "POST":
        context = {"kept": request.GET, "id": uuid.uuid4(), "sent": "sent" in request.GET}
        return render(request, "feedback/feedback_form.html", context)
    problem = _store(request, decision)
    if problem is None:
        thumb = request.POST.get("thumb", "")
        return redirect(f"{reverse('feedback-form', args=[token])}?sent=1&thumb={thumb}")
    context = {"kept": request.POST, "id": uuid.uuid4(), "problem": problem}
    response = render(request, "feedback/feedback_form.html", context, status=problem.status)
    if problem.wait_s:
        response["Retry-After"] = str(problem.wait_s)
    return response


def _store(request: HttpRequest, decision: uuid.UUID) -> Problem | None:
    """Store what the form sends; why it could not be, or None."""
    if wait_s := token_wait(request, decision):
        return Problem(429, f"Too many ratings were sent. Try again in {wait_s} seconds.", wait_s)
    form = FeedbackForm(request.POST)
    if not form.is_valid():
        return Problem(400, form.fault())
    try:
        recorded_or_never(
            decision, then=lambda: rating_submit(decision=decision, rater=APP_USER, **form.facts())
        )
    except FeedbackRefused as refusal:
        text = TEXTS.get(refusal.code) or "; ".join(refusal.fields.values()) or str(refusal)
        return Problem(STATUSES[refusal.code], text, getattr(refusal, "retry_after_s", 0))
    return None


TEXTS = {
    "pending": "The answer is still being recorded. Send the form again in a second.",
    "not_found": "This answer is not recorded (any more), so it cannot be rated.",
    "conflict": "This form was sent before with other words. Send it again to change your rating.",
    "invalid": "",
}
"""Code of a refusal -> what the page says; empty: what the refusal says."""
