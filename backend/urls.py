"""URL configuration: the two applications' addresses and the admin's."""

from django.contrib import admin
from django.urls import include, path, re_path

from backend.glossary import glossary
from backend.rest import errors

admin.autodiscover()

urlpatterns = [
    # first, because it is asked most often
    path("api/", include("feedback.api.urls")),
    path("api/", include("rl.api.urls")),
    # whatever else is asked for there gets JSON too
    path("v1/", include("rl.api.gateway_urls")),
    re_path("^v1/", errors.no_such_address),
    re_path("^api/", errors.no_such_address),
    path("", include("rl.api.health_urls")),
    path("", include("feedback.urls")),
    path("", include("rl.urls")),
    # Django redirects from here to a row's own page, by any content type and id a client writes; no model here has one
    re_path("^admin/r/", errors.no_such_page),
    path("admin/", admin.site.urls),
    path("glossary/", glossary, name="glossary"),
]

handler400 = errors.handler400
handler403 = errors.handler403
handler404 = errors.handler404
handler500 = errors.handler500
