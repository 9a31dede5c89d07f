"""WSGI entry point."""

import gc
import os

import scipy.stats  # noqa: F401  loaded now, as the rest below, and by no command that does not reckon with it
from django.core.wsgi import get_wsgi_application
from django.urls import get_resolver

from backend.database import connections_limit

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")
application = get_wsgi_application()
connections_limit()

# Everything is loaded now instead of with the first request, and then left alone by the garbage collector: going
# through all of it, again and again, held up requests by 100 ms and more.
_ = get_resolver().url_patterns
gc.collect()
gc.freeze()
