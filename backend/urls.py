"""URL configuration."""

from django.conf import settings
from django.contrib import admin
from django.urls import include, path, re_path

from backend.design import design
from backend.glossary import glossary
from backend.rest import errors

admin.autodiscover()

urlpatterns = [
    path("api/", include("feedback.api.urls")),
    path("", include("rl.api.urls")),
    # Unknown addresses below these get JSON too.
    re_path("^v1/", errors.no_such_address),
    re_path("^api/", errors.no_such_address),
    path("", include("feedback.urls")),
    path("", include("rl.urls")),
    # Django would redirect from here to any row's own page; no model has one.
    re_path("^admin/r/", errors.no_such_page),
    path("admin/", admin.site.urls),
    path("glossary/", glossary, name="glossary"),
]

if settings.OIDC_ISSUER:
    urlpatterns.append(path("accounts/", include("allauth.socialaccount.providers.openid_connect.urls")))

if settings.DEBUG:
    urlpatterns.append(path("design/", design, name="design"))

handler400 = errors.handler400
handler403 = errors.handler403
handler404 = errors.handler404
handler500 = errors.handler500
