"""The guided start: from an app's own model to the answer of a new policy, one step at a time."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_safe

from backend.http import button
from backend.installation import bundled_folder
from feedback.accounts.authentication import KeyRefused
from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.cache import StampedCache
from feedback.rating.views import card_in_place
from feedback.selectors import SLUG_PATTERN
from feedback.transfer.formats.records import FormatRefused
from feedback.transfer.import_ import DEFAULT_AGENT, ImportRefused, order_import
from feedback.transfer.uploads import (
    Upload,
    pasted_file,
    pasted_text,
    too_large,
    upload_mapped,
    upload_store,
    upload_try,
    uploads_sweep,
)
from rl.base_models.service import addition_of, agent_base_model
from rl.bundled_models import BUNDLED
from rl.jobs.estimates import automatic_plan
from rl.models import Policy
from rl.registry.checklist import policy_verdict, promotion_of
from rl.registry.comparisons import answers_compared, counts_of, evaluation_newest_paired
from rl.registry.service import rollback_possible
from rl.selectors import AgentCard, agent_cards
from rl.upstreams import UpstreamRefused
from rl.views.runs import FAULT, NOW, OPEN, GuideStep, feedback_minimum, guide_of, step_next
from rl.views.upstreams import MAKE_KEYS, agent_connect, app_key_create, connect_context, connecting_agent

OPERATE, MOVE = SCOPE_PERMISSIONS["operate"], "rl.change_policy"
UPLOAD_KEY, AGENT_KEY = "start_upload", "start_agent"
"""Session keys of the lines that were tried, and the agent it is about."""
EXAMPLE = (
    '{"prompt": "My parcel is late.", "response": "Sorry! It left our depot this morning.", "thumb": "up"}\n'
    '{"prompt": "My parcel is late.", "response": "So what?", "thumb": "down"}'
)
LINES_MISSING = "These lines are no longer here: paste them again."


@login_required
@permission_required(OPERATE, raise_exception=True)
@never_cache
@require_safe
def start(request: HttpRequest) -> HttpResponse:
    """The step an agent is at; `?agent=` says which, `?step=` shows another, `?agent=` alone begins with
    a new one."""
    card = _current_card(request)
    if card is None and (slug := connecting_agent(request)):
        return connect_page(request, slug)
    return _page(request, card)


def connect_page(request: HttpRequest, slug: str, *, status: int = 200, **more: object) -> HttpResponse:
    """The first step for an agent that may have decided nothing yet; an empty slug begins with a new one."""
    cards = {card.facts.slug: card for card in agent_cards(slug)}
    more = {**connect_context(request, slug), "slug": slug, **more}
    return _page(request, cards.get(slug), status=status, step="connect", **more)


def start_address(agent: str, **more: str) -> str:
    """Address of the guided start of an agent."""
    return f"{reverse('start')}?{urlencode({'agent': agent, **more})}"


def _current_card(request: HttpRequest) -> AgentCard | None:
    """The agent the address names, else the one this session was at, else the first whose loop is open; None for a new
    one."""
    named = request.GET.get("agent")
    slug = named if named is not None else request.session.get(AGENT_KEY, "")
    cards = {card.facts.slug: card for card in agent_cards(slug)}
    if slug in cards:
        request.session[AGENT_KEY] = slug
    if named is not None or slug in cards:
        return cards.get(slug)
    waiting = [card for card in cards.values() if _step_at(guide_of(card)).key != "ask"]
    return next(iter([*waiting, *cards.values()]), None)


def _step_at(steps: tuple[GuideStep, ...]) -> GuideStep:
    return next(step for step in steps if step.state in (NOW, FAULT))


def _page(
    request: HttpRequest, card: AgentCard | None, *, status: int = 200, step: str = "", **more: object
) -> HttpResponse:
    """The page of an agent at its step, or at another that was asked for; a later one says what it waits for."""
    steps = guide_of(card)
    at = _step_at(steps)
    key = step or request.GET.get("step", "")
    shown_step = next((one for one in steps if one.key == key), at)
    waits = shown_step.state == OPEN and steps.index(shown_step) > steps.index(at)
    slug = card.facts.slug if card else ""
    context = {
        "card": card,
        "slug": slug,
        "steps": steps,
        "at": at,
        "shown": shown_step,
        "number": steps.index(shown_step) + 1,
        "next": step_next(card) if card else None,
        "needed": feedback_minimum(),
        "here": start_address(slug) if card else reverse("start"),
        "at_number": steps.index(at) + 1,
        "template": f"rl/start/_{'waits' if waits else shown_step.key}.html",
        **({"live": _watching(card)} if waits else _step_context(request, card, shown_step.key)),
        **more,
    }
    return render(request, "rl/start.html", context, status=status)


def _step_context(request: HttpRequest, card: AgentCard | None, key: str) -> dict[str, object]:
    """Context of a step's card beyond the agent."""
    if key == "connect" or card is None:
        return {**_bring_context(request, card), **connect_context(request, card.facts.slug if card else "")}
    watching = _watching(card)
    if key == "rate" or (key == "train" and not watching):
        return _rate_context(request, card)
    if key in ("compare", "promote") and card.newest is not None:
        context = _judged_context(card.newest)
        may_move = request.user.has_perm(MOVE)
        return {
            **context,
            "live": watching,
            "watching": watching,
            "working": watching,
            "may_move": may_move,
            "may_work": may_move and card.newest.run_id is not None,
        }
    if key == "ask":
        return {
            "base_url": request.build_absolute_uri("/v1"),
            "example_question": _question(card.newest) if card.newest else "",
        }
    return {"live": watching, "watching": watching}


def _watching(card: AgentCard | None) -> bool:
    """True while the agent's newest policy is trained, or judged after that."""
    return card is not None and (card.works or (card.run is not None and card.run.kept_run.is_followed))


def _judged_context(policy: Policy) -> dict[str, object]:
    """Wins, losses and ties of a policy, and what the gate to the champion asks for now."""
    evaluation = evaluation_newest_paired(policy)
    answers = answers_compared(evaluation) if evaluation else []
    checks = promotion_of(policy, may_move=True).checks
    return {
        "policy": policy,
        "may_roll_back": rollback_possible(policy),
        "outcomes": counts_of(answers) if evaluation else None,
        "example": next((one for one in answers if one.outcome == "win"), next(iter(answers), None)),
        "against": evaluation.against if evaluation else "",
        "verdict": policy_verdict(policy),
        "check": next((check for check in checks if check.stage == Policy.Stage.CHAMPION), None),
        "needed": feedback_minimum(),
    }


def _question(policy: Policy) -> str:
    """A held-out question to begin with: the newest turn of the first win."""
    evaluation = evaluation_newest_paired(policy)
    messages = next((one.messages for one in answers_compared(evaluation)), ()) if evaluation else ()
    return str(messages[-1].get("content", "")) if messages else ""


# --- Connecting ---------------------------------------------------------------------------------------------


@sensitive_post_parameters("key")
@never_cache
@button(OPERATE)
def start_connect(request: HttpRequest) -> HttpResponse:
    """Set an agent up as the form says, and show its snippets."""
    given = {name: str(value).strip() for name, value in request.POST.items() if name != "key"}
    try:
        policy = agent_connect(given, request.POST.get("key", ""), actor=request.user.get_username())
    except UpstreamRefused as refusal:
        return connect_page(request, "", status=400, given=given, fault=refusal.page_text)
    agent = given["agent"].lower()
    if policy is not None and policy.stage != Policy.Stage.CHAMPION:
        messages.warning(request, f"{policy.name} is a candidate: a policy trained here answers for {agent}.")
    return redirect(start_address(agent, step="connect"))


@never_cache
@button([OPERATE, MAKE_KEYS])
def start_key(request: HttpRequest) -> HttpResponse:
    """Make a key for an agent's app, and show it in the snippets once."""
    agent = request.POST.get("agent", "")
    if not re.fullmatch(SLUG_PATTERN, agent):
        return connect_page(
            request, "", status=400, fault="Agent: expected a short name such as support-bot."
        )
    try:
        return connect_page(request, agent, app_key=app_key_create(agent))
    except KeyRefused as refusal:
        return connect_page(request, agent, status=400, fault=str(refusal))


# --- Rating -------------------------------------------------------------------------------------------------


def _rate_context(request: HttpRequest, card: AgentCard) -> dict[str, object]:
    """The next decision to be rated in place, and the bars above it, which are asked for again while people rate."""
    live = (
        request.headers.get("X-Live") == "1"
    )  # of that our script takes the bars alone: no decision is leased
    stage = {} if live else card_in_place(request, card.facts.slug)
    further = max(feedback_minimum() - card.counts.evidence, 0)
    return {
        **stage,
        "stage": bool(stage),
        "is_live": live,
        # with nothing left to rate the bars stand still
        "live": live or bool(stage) or _is_being_added(card.facts.slug),
        "further": further,
        "rating_s": SECONDS_PER_RATING * further,
        "plan": None if further else _plan(card, fresh=not live),
        **_model_context(card.facts.slug),
    }


@dataclass(frozen=True)
class OfferedModel:
    """A base model that the guided start offers."""

    name: str
    title: str
    use: str


MODELS = (
    OfferedModel(
        BUNDLED,
        "The demo model",
        "Comes with Ratchet and trains in a minute. It picks among given answers and fills in forms; it knows nothing "
        "of the world.",
    ),
    OfferedModel(
        "smollm2",
        "A small real model (93 MB)",
        "SmolLM2, downloaded once. It writes English and understands new wordings; training takes minutes on a laptop.",
    ),
)


def _model_context(agent: str) -> dict[str, object]:
    """The base models offered, the one the agent is on, and how far its adding is."""
    base = agent_base_model(agent)
    own = (
        []
        if base.name in [model.name for model in MODELS]
        else [OfferedModel(base.name, base.name, base.origin)]
    )
    return {"base": base, "addition": addition_of(base.name), "models": [*MODELS, *own]}


def _is_being_added(agent: str) -> bool:
    """True while a worker adds the agent's base model."""
    addition = addition_of(agent_base_model(agent).name)
    return addition is not None and not addition.failed


SECONDS_PER_RATING = 5
"""A rating by a key takes about so long, reading included."""

_plans: StampedCache[dict[str, object]] = StampedCache()


def _plan(card: AgentCard, *, fresh: bool) -> dict[str, Any]:
    """The training that a button would start now, planned anew when there is new feedback."""
    slug, counts = card.facts.slug, card.counts
    stamp = (counts.decisions, counts.evidence, counts.newest_at, agent_base_model(slug).name)
    return _plans.get_unless(slug, stamp, lambda: automatic_plan(slug), fresh=fresh)


# --- Bringing decisions -------------------------------------------------------------------------------------


def _bring_context(request: HttpRequest, card: AgentCard | None) -> dict[str, object]:
    return {
        "example": EXAMPLE,
        "given": request.POST,
        "bringing": request.GET.get("by") == "lines",
        "sample": sample_rows() if request.GET.get("by") == "sample" else "",
        "agent_given": request.POST.get("agent", card.facts.slug if card else request.GET.get("name", "")),
    }


def sample_rows() -> str:
    """Sixty tickets of a shop with the queue that a model chose, as a spreadsheet would have them."""
    return (bundled_folder("static") / "samples/tickets.csv").read_text("utf-8")


@csrf_exempt  # the size is looked at before the body is read; _start_bring checks the token
@never_cache
def start_bring(request: HttpRequest) -> HttpResponseBase:
    """Try pasted lines or a file (or other columns of the one taken), and show what was recognised; stores nothing."""
    return too_large(request) or _start_bring(request)


@button(OPERATE)
@csrf_protect  # reads the body
def _start_bring(request: HttpRequest) -> HttpResponse:
    if request.POST.get("token"):
        upload = _session_upload(request)
        if upload is None:
            return _bring_again(request, LINES_MISSING)
        try:
            return _trial_response(request, upload_mapped(upload, request.POST))
        except FormatRefused as refusal:
            return _trial_response(request, upload, fault=upload.for_page(str(refusal)))
    _forget(request)
    agent = request.POST.get("agent", "").strip().lower()
    if agent and not re.fullmatch(SLUG_PATTERN, agent):
        return _bring_again(request, "Agent: expected a short name such as support-bot.")
    text = pasted_text(request.POST.get("text", ""))
    file = request.FILES.get("file")
    if file is None and not text:
        return _bring_again(request, "Expected lines or a file, found neither: paste some, or choose a file.")
    return _trial_response(request, upload_store(file or pasted_file(text), None, agent=agent))


def _bring_again(request: HttpRequest, fault: str) -> HttpResponse:
    return _page(request, _current_card(request), status=400, step="connect", fault=fault, bringing=True)


def _trial_response(request: HttpRequest, upload: Upload, *, fault: str = "") -> HttpResponse:
    trial = upload_try(upload, actor=request.user.get_username(), fault=fault)
    if not trial.readable:
        uploads_sweep(upload.token)
        return _bring_again(request, trial.fault)
    request.session[UPLOAD_KEY] = asdict(trial.upload)
    more = {"take_url": reverse("start-take"), "again_url": reverse("start-bring")}
    context = {**trial.context, **more, "other_url": f"{reverse('start')}?agent=&by=lines"}
    return render(request, "rl/start_tried.html", context, status=400 if trial.fault else 200)


@button(OPERATE)
def start_take(request: HttpRequest) -> HttpResponse:
    """Import the lines that this session tried, and go on with their agent."""
    upload = _session_upload(request)
    if upload is None:
        return _bring_again(request, LINES_MISSING)
    order = upload.order(actor=request.user.get_username(), skip_bad=request.POST.get("skip_bad") == "on")
    try:
        report = order_import(order)
    except (FormatRefused, ImportRefused) as refusal:
        return _bring_again(request, upload.for_page(str(refusal)))
    finally:
        _forget(request)
    note = messages.warning if report.problem or report.batch is None else messages.success
    note(request, f"{report.headline[:1].upper()}{report.headline[1:]}.")
    agents = sorted(report.agents)
    return redirect(start_address(agents[0] if agents else upload.agent or DEFAULT_AGENT))


def _session_upload(request: HttpRequest) -> Upload | None:
    """The lines of this session that the form names."""
    upload = Upload.of(request.session.get(UPLOAD_KEY) or {})
    return upload if upload is not None and upload.token == request.POST.get("token") else None


def _forget(request: HttpRequest) -> None:
    upload = request.session.pop(UPLOAD_KEY, None) or {}
    uploads_sweep(str(upload.get("token", "")) or "-")
