"""URL configuration."""

from django.contrib import admin
from django.urls import include, path, re_path

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

handler400 = errors.handler400
handler403 = errors.handler403
handler404 = errors.handler404
handler500 = errors.handler500
