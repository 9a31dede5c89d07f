"""The first step of the guided start: what answers today is chosen, and the first decision is waited for."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client

from feedback.accounts.authentication import key_check
from feedback.cache import forget_all
from feedback.models import AgentSettings, ApiKey
from feedback.services import decision_record
from rl.models import Policy, Upstream
from rl.registry.service import champion_of
from rl.serving.routing import target_of
from rl.upstreams import upstream_add, upstream_key
from tests.support.api_client import person
from tests.support.stub_openai import ModelServer
from tests.test_upstreams import KEY

pytestmark = pytest.mark.django_db


@pytest.fixture
def provider() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


def connect(client: Client, **more: Any) -> Any:
    return client.post("/start/connect/", {"agent": "shop", "answers": "url", "model": "m-1", **more})


def test_a_server_of_ones_own_answers_from_then_on(operator: Client, provider: ModelServer) -> None:
    done = connect(operator, url=provider.url, key=KEY)
    assert done.headers["Location"] == "/start/?agent=shop&step=connect"
    assert provider.bodies[0]["model"] == "m-1"
    (upstream,) = Upstream.objects.all()
    assert (upstream_key(upstream), upstream.model) == (KEY, "m-1")
    champion = champion_of("shop")
    assert (champion.kind, champion.upstream) == ("hosted", upstream)
    page = operator.get(done.headers["Location"])
    assert page.context["connected"]
    for part in ('base_url="http://testserver/v1"', 'model="shop"', "http://testserver/v1/chat/completions"):
        assert part in page.text
    assert KEY not in page.text
    assert target_of("shop").models[0].name == champion.name


def test_an_app_that_calls_its_model_itself_gets_snippets_that_record(operator: Client) -> None:
    page = operator.get(connect(operator, answers="app", model="").headers["Location"])
    assert (page.context["hosted"], Upstream.objects.count()) == (None, 0)
    assert 'Client("shop", url="http://testserver"' in page.text
    assert "http://testserver/api/decisions/" in page.text


def test_a_name_that_was_set_up_is_never_unknown_to_the_gateway(operator: Client) -> None:
    connect(operator, answers="app")
    assert target_of("shop").agent == "shop"
    assert AgentSettings.objects.get().agent == "shop"


def test_an_upstream_that_is_there_answers_for_another_agent(operator: Client) -> None:
    upstream = upstream_add(
        {"name": "openai", "url": "https://api.openai.com/v1", "model": "gpt-5-mini"}, KEY
    )
    connect(operator, answers="upstream:openai", model="")
    assert [policy.upstream for policy in Policy.objects.filter(agent="shop")] == [upstream]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"agent": "Not a slug!"}, "support-bot"),
        ({"answers": ""}, "Choose what answers today"),
        ({"answers": "upstream:nobody"}, "No upstream"),
        ({"url": "nonsense"}, "Address: expected"),
        ({"url": "http://[bad"}, "Address: expected"),
        ({"url": ""}, "Address: expected"),
        ({"url": "http://127.0.0.1:1/v1"}, "cannot be reached"),
        ({"answers": "openai", "model": ""}, "Model: expected"),
        ({"answers": "openai", "key_env": "SECRET_KEY"}, "Environment variable: expected"),
    ],
)
def test_what_cannot_be_connected_stores_nothing(operator: Client, sent: dict[str, str], said: str) -> None:
    page = connect(operator, key="" if "key_env" in sent else KEY, **sent)
    assert page.status_code == 400
    assert said in page.context["fault"]
    assert KEY not in page.text
    assert not Upstream.objects.exists()
    assert not Policy.objects.exists()


def test_an_upstream_that_is_away_can_be_connected_all_the_same(operator: Client) -> None:
    away = "http://127.0.0.1:1/v1"
    assert 'name="untested"' in connect(operator, url=away).text
    assert connect(operator, url=away, untested="on").status_code == 302
    assert Upstream.objects.get().url == away


def test_the_page_waits_for_the_first_decision_and_shows_it(operator: Client) -> None:
    connect(operator, answers="app")
    waiting = operator.get("/start/?agent=shop&step=connect")
    assert 'data-live="on"' in waiting.text
    assert (
        "/start/?agent=shop&amp;step=connect" in waiting.text
    )  # where a script, or a link without one, looks again
    decision_record(agent="shop", messages="Where is it?", response="On its way.")
    forget_all()
    arrived = operator.get("/start/?agent=shop&step=connect")
    assert (arrived.context["asked"], arrived.context["arrived"].response) == ("Where is it?", "On its way.")
    assert '<a class="button" href="/start/?agent=shop">Rate it</a>' in arrived.text
    assert operator.get("/start/?agent=shop").context["shown"].key == "rate"


def test_a_key_for_the_app_is_shown_once_by_who_may_make_keys(client: Client) -> None:
    client.force_login(person("the-admin", "admin"))
    page = client.post("/start/key/", {"agent": "shop"})
    key = page.context["app_key"]
    assert page.text.count(key) == 3
    assert key_check(key).scopes == ["ingest", "rate"]
    assert key not in client.get("/start/?agent=shop&step=connect").text
    assert client.post("/start/key/", {"agent": "shop"}).status_code == 200
    assert list(ApiKey.objects.order_by("pk").values_list("name", flat=True)) == ["shop app", "shop app 2"]


def test_an_operator_who_may_not_make_keys_is_refused(operator: Client) -> None:
    assert operator.post("/start/key/", {"agent": "shop"}).status_code == 403
    assert not ApiKey.objects.exists()
