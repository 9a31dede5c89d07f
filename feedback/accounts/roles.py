"""Roles of people (rater, operator, admin) and the REST scopes of their permissions."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib.auth.decorators import login_required, permission_required
from django.contrib.auth.models import AnonymousUser, Group, User
from django.db import transaction
from django.http.response import HttpResponseBase
from django.views.decorators.http import require_http_methods

RATER, OPERATOR, ADMIN = "rater", "operator", "admin"
ROLES = {
    RATER: "rates and compares what is in the queue; sees neither the policy behind a decision nor others' ratings",
    OPERATOR: "finds and reads all feedback, imports and exports, sets what is collected, trains and promotes",
    ADMIN: "what an operator may do, and people, roles and API keys",
}
"""Group created by the migration -> what its members may do."""

SCOPE_PERMISSIONS = {
    "ingest": "feedback.add_decision",
    "rate": "feedback.add_rating",
    "read": "feedback.view_decision",
    "operate": "feedback.change_agentsettings",
}
"""REST scope -> Django permission that a signed-in person needs."""


class RoleUnknown(ValueError):
    """There is no such role."""


def role_give(user: User, role: str) -> None:
    """Replace a person's role. Operators and admins may open the admin. Raises RoleUnknown."""
    if role not in ROLES:
        raise RoleUnknown(f"no role {role!r}; there are {', '.join(ROLES)}")
    with transaction.atomic():
        user.groups.remove(*Group.objects.filter(name__in=ROLES))
        user.groups.add(Group.objects.get(name=role))
        user.is_staff = user.is_superuser or role != RATER
        user.save(update_fields=["is_staff"])


def user_scopes(user: User | AnonymousUser) -> frozenset[str]:
    """REST scopes of a signed-in person; none for an inactive account."""
    return frozenset(
        scope
        for scope, permission in SCOPE_PERMISSIONS.items()
        if user.is_active and user.has_perm(permission)
    )


def landing_page(user: User | AnonymousUser) -> str:
    """URL name of the first page after sign-in: the queue for raters, the start page for others."""
    scopes = user_scopes(user)
    return "rate" if "rate" in scopes and "read" not in scopes else "home"


View = Callable[..., HttpResponseBase]


def page_for(scope: str, *methods: str) -> Callable[[View], View]:
    """Guard a page: signed in, with the permission of this scope, by these HTTP methods (default: GET and HEAD)."""

    def guarded(view: View) -> View:
        allowed = permission_required(SCOPE_PERMISSIONS[scope], raise_exception=True)(
            require_http_methods(list(methods or ("GET", "HEAD")))(view)
        )
        return login_required(allowed)

    return guarded
