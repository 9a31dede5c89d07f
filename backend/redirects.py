"""Redirects after a form was sent: back to the page of ours that it stood on."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponseRedirect
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme


def redirect_back(request: HttpRequest, usual: str, *args: Any) -> HttpResponseRedirect:
    """To the address in the form's field `back`, where it is a path of this server; else to the usual route."""
    back = request.POST.get("back", "")
    if back.startswith("/") and url_has_allowed_host_and_scheme(back, allowed_hosts=None):
        return redirect(back)
    return redirect(usual, *args)
