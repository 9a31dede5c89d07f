"""WSGI entry point."""

import gc
import os

import datasketch  # noqa: F401  Loaded before the first request, as the rest below.
import scipy.stats  # noqa: F401
from django.core.wsgi import get_wsgi_application
from django.urls import reverse

from backend.database import connections_limit

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")
application = get_wsgi_application()
connections_limit()

# Load everything before the first request and exempt it from garbage collection, which delayed requests by 100 ms and
# more.
reverse("start")  # imports every view and builds the table of addresses
gc.collect()
gc.freeze()
