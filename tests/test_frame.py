"""The frame of pages and admin: one bar, one set of words, error pages of the same look, the glossary."""

import re
import uuid
from typing import Any

import pytest
from django.conf import settings
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client, RequestFactory
from django.urls import Resolver404, resolve

from backend.design import design
from backend.glossary import explained, terms
from backend.installation import bundled_folder
from backend.rest import errors
from feedback.accounts.sign_in import signin_link
from feedback.cache import forget_all
from feedback.storage.problem_rows import RowReader
from rl.gates.report import RULE_TITLES
from rl.models import AgentDefinition, Policy, TrainingRun
from tests.support.api_client import person
from tests.support.registry_rows import make_policy, make_run
from tests.support.said import words
from tests.test_content_security import inline

pytestmark = pytest.mark.django_db

TEMPLATES = bundled_folder("templates")
PASSWORD = "correct horse battery"


@pytest.fixture
def ada(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("ada"))
    client.raise_request_exception = False
    return client


@pytest.mark.parametrize(
    ("role", "asked", "page"),
    [
        ("rater", "", "/rate/"),
        ("rater", "/", "/rate/"),
        ("rater", "/rate/pairs/", "/rate/pairs/"),
        ("operator", "", "/"),
        ("operator", "/", "/"),
        ("admin", "/policies/", "/policies/"),
        ("rater", "https://elsewhere.example/", "/rate/"),
    ],
)
def test_sign_in_leads_to_the_page_or_the_work(client: Client, role: str, asked: str, page: str) -> None:
    person("bob", role)
    answer = client.post("/accounts/login/", {"username": "bob", "password": PASSWORD, "next": asked})
    assert (answer.status_code, answer["Location"]) == (302, page)


def test_a_link_leads_a_rater_to_the_queue_and_others_to_the_start(client: Client) -> None:
    person("bob", "rater")
    person("ann", "operator")
    for name, page in (("bob", "/rate/"), ("ann", "/")):
        assert client.post(signin_link(name, "http://localhost").url)["Location"] == page


def test_the_admin_signs_in_on_the_same_page(client: Client) -> None:
    person("ann", "operator")
    page = client.get("/admin/rl/policy/", follow=True)
    assert page.redirect_chain[-1][0] == "/admin/login/?next=/admin/rl/policy/"
    assert '<section class="sign-in-card">' in page.text
    form = {"username": "ann", "password": PASSWORD, "next": "/admin/rl/policy/"}
    assert 'class="fault" role="alert"' in client.post("/admin/login/", form | {"password": "no"}).text
    assert client.post("/admin/login/", form)["Location"] == "/admin/rl/policy/"


def test_a_rater_is_told_that_the_admin_is_for_others(client: Client) -> None:
    client.force_login(person("bob", "rater"))
    page = client.get("/admin/", follow=True)
    assert page.status_code == 403
    assert "sign-in-card" not in page.text


def navigation() -> list[dict[str, Any]]:
    return [item for group in settings.UNFOLD["SIDEBAR"]["navigation"] for item in group["items"]]


def test_the_admin_has_one_word_for_each_list_and_leaves_none_out() -> None:
    listed = {str(item["link"]): item["title"].lower() for item in navigation()}
    registered = {
        f"/admin/{model._meta.app_label}/{model._meta.model_name}/": str(
            model._meta.verbose_name_plural
        ).lower()
        for model in admin.site._registry
    }
    assert {link: title for link, title in listed.items() if link.startswith("/admin/")} == registered


def test_the_admins_first_page_lists_what_its_reader_may_see(client: Client) -> None:
    client.force_login(person("ann", "operator"))
    page = client.get("/admin/").text
    assert "Who may sign in" not in page
    assert "What an operator sets for an agent" in page


@pytest.mark.parametrize("address", ["/admin/", "/admin/rl/policy/", "/admin/auth/user/", "/api/docs/"])
def test_the_bar_of_the_pages_leads_back_from_everywhere(ada: Client, address: str) -> None:
    page = ada.get(address).text
    assert re.search(r'<a href="/rate/"', page[page.index('<header class="masthead">') :])
    assert "frame.css" in page


def test_the_address_of_a_button_says_so_when_it_is_opened(ada: Client) -> None:
    answer = ada.get("/rate/undo/")
    assert (answer.status_code, answer["Allow"]) == (405, "POST")
    assert "only takes what a button sends" in answer.text
    assert '<header class="masthead">' in answer.text
    assert inline(answer.text) == []


def test_a_page_that_is_only_read_refuses_what_is_sent(ada: Client) -> None:
    answer = ada.post("/policies/")
    assert answer.status_code == 405
    assert "Nothing can be sent here" in answer.text


def test_the_page_of_a_fault_needs_no_database(ada: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("ours")

    monkeypatch.setattr("backend.glossary.terms", broken)
    ada.get("/glossary/")

    def none(*_: Any) -> Any:
        raise AssertionError("the page of a fault asked the database")

    request = ada.get("/glossary/").wsgi_request
    with connection.execute_wrapper(none):
        answer = errors.handler500(request)
    assert answer.status_code == 500
    assert "Something went wrong" in answer.text
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", answer.text)
    assert inline(answer.text) == []


def test_links_into_the_glossary_name_terms_that_are_there() -> None:
    anchors = {term.anchor for term in terms()}
    linked = {
        (file.name, anchor)
        for file in (settings.BASE_DIR / "templates").rglob("*.html")
        for anchor in re.findall(r"url 'glossary' %}#([\w-]+)", file.read_text("utf-8"))
    }
    assert linked
    texts = [file.read_text("utf-8") for file in (settings.BASE_DIR / "templates").rglob("*.html")]
    marked = {name for text in texts for name in re.findall(r'{% help "([^"]+)" %}', text)}
    assert {"policy", "gate", "champion"} <= marked
    assert {name for name in marked if explained(name, "term") is None} == set()
    assert {(name, anchor) for name, anchor in linked if anchor not in anchors} == set()


def test_a_term_leads_to_the_page_of_the_app_that_its_reader_may_open(ada: Client, client: Client) -> None:
    assert [
        term.name for term in terms() if term.page == "docs/gates.md" and term.address != "/policies/"
    ] == []
    assert re.search(r'id="gate".*?href="/policies/">Policies<', ada.get("/glossary/").text, re.DOTALL)
    client.force_login(person("bob", "rater"))
    assert "/policies/" not in client.get("/glossary/").text


def test_the_admin_writes_a_name_as_it_is_and_asks_plainly_before_it_deletes(ada: Client) -> None:
    row = AgentDefinition.objects.create(slug="support-router", title="Support router")
    page = ada.get(f"/admin/rl/agentdefinition/{row.pk}/delete/").text
    assert re.search(r"<h1.*?>\s*support-router\s*</a>", page, re.DOTALL)
    assert "<h2>Delete support-router?</h2>" in page
    ada.post(f"/admin/rl/agentdefinition/{row.pk}/delete/", {"post": "yes"})
    assert not AgentDefinition.objects.exists()


def test_every_rule_of_the_gate_has_its_explanation() -> None:
    found = {rule: explained(rule, "rule") for rule in RULE_TITLES}
    assert [rule for rule, term in found.items() if term is None] == []
    accuracy = explained("accuracy", "rule")
    assert (accuracy.anchor, "](" in accuracy.meaning) == ("rule-accuracy", False)


def test_every_page_says_what_runs_in_the_background(ada: Client) -> None:
    assert "at-work-strip" not in ada.get("/glossary/").text
    forget_all()
    run = make_run(status="running", steps_total=40, steps_done=10, phase="training")
    strip = re.search(r'<p class="at-work-strip">(.*?)</p>', ada.get("/glossary/").text, re.DOTALL)
    assert f'href="/runs/{run.pk}/"' in strip[1]
    assert "step 10 of 40" in strip[1]


def test_the_strip_names_the_run_that_trains_before_those_that_wait(ada: Client) -> None:
    forget_all()
    trains = make_run(status="running", phase="training")
    waits = make_run(status="queued")
    page = ada.get("/glossary/").text
    assert page.index(f'href="/runs/{trains.pk}/"') < page.index(f'href="/runs/{waits.pk}/"')


def test_a_raters_bar_leads_to_no_trainings(client: Client) -> None:
    make_run(status="running", finished_at=None)
    forget_all()
    client.force_login(person("bob", "rater"))
    page = client.get("/rate/").text
    assert "at-work-strip" not in page
    assert 'href="/runs/' not in page


def test_the_admin_writes_a_time_as_the_pages_do(ada: Client) -> None:
    make_policy()
    times = re.findall(
        r'class="[^"]*field-created_at[^"]*"[^>]*>(.*?)</td>', ada.get("/admin/rl/policy/").text, re.DOTALL
    )
    assert [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", words(one)) is not None for one in times] == [True]


def test_pages_write_a_time_in_one_way() -> None:
    pages = "".join(page.read_text("utf-8") for page in TEMPLATES.rglob("*.html"))
    shown = set(re.findall(r"date:['\"](.*?)['\"]", pages))
    assert shown == {"c", "Y-m", "Y-m-d", "Y-m-d H:i", "Y-m-d H:i:s"}


def test_the_glossary_is_searched_by_name_and_meaning(ada: Client) -> None:
    found = ada.get("/glossary/?q=Propensit")
    assert "propensity" in [term.name for term in found.context["terms"]]
    assert 0 < len(found.context["terms"]) < len(terms()) / 2
    assert "No term has “&lt;b&gt;”" in ada.get("/glossary/", {"q": "<b>"}).text


def test_the_admin_invites_people_on_the_page_of_people(ada: Client) -> None:
    assert ada.get("/admin/auth/user/add/")["Location"] == "/people/"


def test_the_navigation_counts_problems_where_there_are_any(ada: Client) -> None:
    assert 'href="/problems/"' not in ada.get("/glossary/").text
    reader = RowReader("support", "dataset")
    reader.skip(uuid.uuid4(), ValueError("expected a list"))
    reader.save()
    forget_all()
    assert re.search(r'href="/problems/">Problems <span class="count">1<', ada.get("/glossary/").text)


def test_the_design_page_shows_both_themes_and_is_no_page_without_debug(rf: RequestFactory) -> None:
    with pytest.raises(Resolver404):
        resolve("/design/")
    request = rf.get("/design/")
    request.user = User.objects.create_superuser("ada")
    html = design(request).content.decode()
    assert 'class="theme theme-light"' in html
    assert 'class="theme theme-dark"' in html
    assert set(re.findall(r'"status status-(\w+)"', html)) == set(TrainingRun.Status.values)
    assert set(re.findall(r'"stage stage-(\w+)"', html)) == set(Policy.Stage.values)
