"""The page of people: who may sign in, and links for them, by those who may give roles."""

from urllib.parse import urlsplit

import pytest
from django.contrib.auth.models import User
from django.test import Client

from tests.support.api_client import signed_in

pytestmark = pytest.mark.django_db


def inviter(role: str = "admin") -> Client:
    return signed_in("the-inviter", role)


def test_an_invitation_adds_a_person_with_a_role_and_signs_them_in_once() -> None:
    page = inviter().post("/people/", {"name": "ann", "role": "operator"})
    link = page.context["link"]
    assert (page.status_code, page["Cache-Control"].count("no-store")) == (200, 1)
    assert link.url in page.text
    assert '<button type="button" data-copy="link" hidden>Copy</button>' in page.text
    ann = User.objects.get(username="ann")
    assert (list(ann.groups.values_list("name", flat=True)), ann.is_staff) == (["operator"], True)
    guest = Client()
    assert guest.post(urlsplit(link.url).path).status_code == 302
    assert guest.get("/decisions/").status_code == 200
    assert Client().post(urlsplit(link.url).path).status_code == 410


def test_a_new_link_keeps_the_role_and_ends_the_one_before() -> None:
    client = inviter()
    first = client.post("/people/", {"name": "bob", "role": "rater"}).context["link"]
    second = client.post("/people/", {"name": "bob", "role": "admin"}).context["link"]
    assert Client().post(urlsplit(second.url).path).status_code == 302
    assert Client().post(urlsplit(first.url).path).status_code == 410
    assert list(User.objects.get(username="bob").groups.values_list("name", flat=True)) == ["rater"]


def test_nobody_gets_the_rights_of_a_superuser_by_a_link() -> None:
    User.objects.create_superuser("root")
    client = inviter()
    refused = client.post("/people/", {"name": "root", "role": "rater"})
    assert (refused.status_code, refused.context["link"]) == (400, None)
    assert 'aria-label="New link for root"' not in client.get("/people/").text


@pytest.mark.parametrize("form", [{"name": "ann", "role": "king"}, {"name": "a b", "role": "rater"}, {}])
def test_what_is_no_name_or_role_is_refused_and_adds_nobody(form: dict[str, str]) -> None:
    assert inviter().post("/people/", form).status_code == 400
    assert User.objects.count() == 1


@pytest.mark.parametrize(("role", "status"), [("operator", 403), ("admin", 302)])
def test_the_admins_own_page_for_adding_somebody_leads_inviters_alone_here(role: str, status: int) -> None:
    assert inviter(role).get("/admin/auth/user/add/").status_code == status
