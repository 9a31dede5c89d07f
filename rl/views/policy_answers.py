"""Page that leafs through held-out prompts: the answers of a policy beside those of the side it was judged against."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required, permission_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from rl.models import Policy
from rl.registry.comparisons import LOSS, TIE, WIN, answers_compared, counts_of, evaluation_newest_paired

READ = "rl.view_policy"
OUTCOME_TITLES = ((WIN, "Wins"), (LOSS, "Losses"), (TIE, "Ties"))


@login_required
@permission_required(READ, raise_exception=True)
@require_safe
def policy_answers(request: HttpRequest, name: str) -> HttpResponse:
    """One prompt with both answers: `?show=win`, `loss` or `tie`, `?at=` its number among them."""
    policy = get_object_or_404(Policy, name=name)
    evaluation = evaluation_newest_paired(policy)
    every = answers_compared(evaluation) if evaluation else []
    counts, show = counts_of(every), request.GET.get("show", "")
    if show and show not in counts:
        raise Http404("expected show=win, loss or tie")
    matches = [one for one in every if show in ("", one.outcome)]
    number_text = request.GET.get("at", "1")
    number = min(
        max(
            int(number_text)
            if number_text.isascii() and number_text.isdigit() and len(number_text) < 9
            else 1,
            1,
        ),
        len(matches),
    )
    context = {
        "policy": policy,
        "evaluation": evaluation,
        "against": evaluation.against if evaluation else "",
        "one": matches[number - 1] if matches else None,
        "at": number,
        "among": len(matches),
        "all": len(every),
        "show": show,
        "kinds": [(key, title, counts[key]) for key, title in OUTCOME_TITLES],
        "before": number - 1 if number > 1 else None,
        "after": number + 1 if number < len(matches) else None,
    }
    return render(request, "rl/policy_answers.html", context)
