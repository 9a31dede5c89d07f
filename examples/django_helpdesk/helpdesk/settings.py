"""Settings of the help desk: one app, one SQLite file, and where Ratchet is."""

from __future__ import annotations

import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent

RATCHET_URL = os.environ.get("RATCHET_URL", "http://localhost:8000")
RATCHET_KEY = os.environ.get("RATCHET_KEY", "")
RATCHET_AGENT = "helpdesk"
# Seconds the page waits for a suggestion before it is shown without
RATCHET_TIMEOUT_S = float(os.environ.get("RATCHET_TIMEOUT_S", 5))
HELPDESK_HOME = Path(os.environ.get("HELPDESK_HOME", BASE_DIR / "var"))
HELPDESK_HOME.mkdir(parents=True, exist_ok=True)

# For trying out on one machine. In production: a key of your own, DEBUG off, and your own hosts.
SECRET_KEY = os.environ.get("HELPDESK_SECRET_KEY", "an-example-that-holds-no-secrets")
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]

INSTALLED_APPS = ["django.contrib.staticfiles", "helpdesk"]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
]
ROOT_URLCONF = "helpdesk.urls"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": ["django.template.context_processors.request"]},
    }
]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": HELPDESK_HOME / "helpdesk.sqlite3"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "static/"
USE_TZ = True
