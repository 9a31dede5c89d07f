"""No page shows an API key: neither an upstream's nor an app's, also after failures that repeat one."""

from typing import Any

import pytest
from django.test import Client

from feedback.accounts.authentication import key_create
from feedback.models import ApiKey
from rl.upstreams import hosted_policy_create, upstream_add, upstream_get
from tests.support.api_client import ApiClient
from tests.support.hosted import model_server  # noqa: F401
from tests.support.page_world import AGENT, admin_pages, user_pages, world_recorded
from tests.support.stub_openai import ModelServer

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

STORED, NAMED, LOCAL = (f"sk-{kind}-planted-0123456789abcdef" for kind in ("stored", "named", "local"))


def test_no_page_shows_a_key(
    admin_client: Client, stub: ModelServer, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", NAMED)
    settings.LOCAL_API_KEY = LOCAL
    whole = world_recorded()
    upstream_add({"name": "stored", "url": stub.url, "model": "m-1"}, STORED)
    upstream_add({"name": "named", "url": stub.url, "model": "m-2", "key_env": "PLANTED_API_KEY"})
    apps_key = key_create("planted", ["ingest", "read"])[1]
    for name, key in (("stored", STORED), ("named", NAMED)):
        stub.error = {"message": f"{key} may not do this"}
        policy = hosted_policy_create(AGENT, upstream_get(name), actor="ada")
        stub.statuses = [401, 401]
        asked = {"model": policy.name, "messages": [{"role": "user", "content": "hello"}]}
        assert ApiClient(key=apps_key).post("/v1/chat/completions", asked).status_code == 503
        assert admin_client.post(f"/upstreams/{name}/", {"act": "test"}).status_code == 302
    keys = (STORED, NAMED, LOCAL, apps_key)
    hidden = (*keys, upstream_get("stored").key_encrypted, ApiKey.objects.get(name="planted").key_hash)
    seen = 0
    for address in (*user_pages(whole), *admin_pages()):
        page = admin_client.get(address, follow=True)
        if page.status_code == 403:  # nobody may
            continue
        assert page.status_code == 200, address
        shown = [secret for secret in hidden if secret in page.text]
        assert not shown, f"{address} shows {shown}"
        seen += 1
    assert seen > 100
