"""Settings of the one Django project. The only place that reads os.environ (and `.env`)."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import dj_database_url
from django.conf import global_settings
from django.core.exceptions import ImproperlyConfigured
from django.templatetags.static import static
from dotenv import load_dotenv

from backend import VERSION, limits
from backend.admin_navigation import NAVIGATION
from backend.installation import ROOT, bundled_folder, default_home, dotenv_file, home_private, key_file
from backend.operator_file import OperatorFileError, operator_file
from backend.plugins import left_out, plugins_load

BASE_DIR = ROOT
load_dotenv(dotenv_file(os.environ))
# oneDNN caches a kernel with its memory for each matrix shape, 1,024 of them by default. Rows of many lengths then take
# gigabytes. oneDNN reads the limit at the first product.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
# Child processes inherit the environment and run in BASE_DIR, so relative paths become absolute.
for _name in ("RATCHET_HOME", "RATCHET_CONFIG"):
    if os.environ.get(_name):
        os.environ[_name] = str(Path(os.environ[_name]).expanduser().absolute())


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text in ("", "1", "true", "yes", "on", "0", "false", "no", "off"):
        return default if not text else text in ("1", "true", "yes", "on")
    raise ImproperlyConfigured(f"{name} must be true or false, found {text!r}")


def _number(name: str, default: float, low: float, high: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        found = float(text) if text else default
    except ValueError:
        found = float("nan")
    if not low <= found <= high:
        raise ImproperlyConfigured(f"{name} must be a number from {low:g} to {high:g}, found {text!r}")
    return found


def _artifact_storage(place: str) -> dict[str, object]:
    """The storage of ARTIFACT_STORE: `s3://bucket/prefix`, or an absolute folder that every server can reach."""
    if not place:
        return {}
    if place.startswith("/"):
        backend, options = "django.core.files.storage.FileSystemStorage", {"location": place}
    else:
        scheme, _, rest = place.partition("://")
        bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not bucket:
            raise ImproperlyConfigured(
                f"ARTIFACT_STORE must be an absolute folder or s3://bucket/prefix, found {place!r}"
            )
        if find_spec("storages") is None:
            raise ImproperlyConfigured(
                'ARTIFACT_STORE in a bucket needs two more packages: pip install ".[s3]"'
            )
        backend = "storages.backends.s3.S3Storage"
        options = {"bucket_name": bucket, "location": prefix.strip("/")}
    return {"artifacts": {"BACKEND": backend, "OPTIONS": options}}


def _pairs(name: str) -> dict[str, str]:
    """`key=value` pairs, separated by commas."""
    pairs = [part.partition("=") for part in os.environ.get(name, "").split(",") if part.strip()]
    if any(not value.strip() for _, _, value in pairs):
        raise ImproperlyConfigured(f"{name} must be pairs such as a=b,c=d, found {os.environ[name]!r}")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _paths(name: str) -> list[str]:
    """Dotted paths, separated by commas."""
    return [path.strip() for path in os.environ.get(name, "").split(",") if path.strip()]


# --- Folders and models -----------------------------------------------------------------------------------
RATCHET_HOME = Path(os.environ.get("RATCHET_HOME") or default_home(os.environ)).expanduser().resolve()
home_private(RATCHET_HOME)
# The cache of Hugging Face's libraries. A plan reads a model's shape from it without importing them.
HF_HUB_CACHE = Path(
    os.environ.get("HF_HUB_CACHE")
    or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
)
RATCHET_PROFILE = os.environ.get("RATCHET_PROFILE") or "auto"
# Methods of plugins load before RATCHET_CONFIG, which has a section for each. Other plugins load with Django.
RATCHET_METHODS = _paths("RATCHET_METHODS")
plugins_load("methods", RATCHET_METHODS)
try:
    _operator = operator_file(os.environ.get("RATCHET_CONFIG") or "", methods_missing=left_out("methods"))
except OperatorFileError as error:
    raise ImproperlyConfigured(str(error)) from error
# Section -> {knob: value}, and section -> base model of that method
RATCHET_CONFIG = _operator.sections
RATCHET_BASE_MODELS = _operator.base_models
RATCHET_BASE_MODEL = os.environ.get("RATCHET_BASE_MODEL") or _operator.base_model or "bundled"


RATCHET_VERSION = VERSION
OLLAMA_HOST = os.environ.get("OLLAMA_HOST") or ""
OLLAMA_MODELS = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
"""Ollama's store on disk: `model add ollama:NAME` reads from it."""
OLLAMA_MODEL_FAST = os.environ.get("OLLAMA_MODEL_FAST") or ""
ENABLE_ONLINE_LEARNING = _flag("ENABLE_ONLINE_LEARNING", bool(_operator.enabled))
ENABLE_CODE_EXECUTION = _flag("ENABLE_CODE_EXECUTION", False)

TRAIN_LAUNCHER = shlex.split(os.environ.get("TRAIN_LAUNCHER") or "")

# --- Security ---------------------------------------------------------------------------------------------
DEBUG = _flag("DEBUG", False)
ALLOWED_HOSTS = [
    h.strip() for h in os.environ.get("ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]").split(",") if h.strip()
]
CSRF_TRUSTED_ORIGINS = [o.strip() for o in os.environ.get("CSRF_TRUSTED_ORIGINS", "").split(",") if o.strip()]


def _secret_key() -> str:
    """The key from the environment, or one made once and kept in RATCHET_HOME."""
    from django.core.management.utils import get_random_secret_key

    return os.environ.get("SECRET_KEY") or key_file(RATCHET_HOME / "secret_key", get_random_secret_key)


try:
    SECRET_KEY = _secret_key()
except OSError as error:
    raise ImproperlyConfigured(
        f"RATCHET_HOME ({RATCHET_HOME}) must be a folder this user can write to: {error}. "
        "Set RATCHET_HOME to another folder, or SECRET_KEY."
    ) from error

SECURE_CONTENT_TYPE_NOSNIFF = True
X_FRAME_OPTIONS = "DENY"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
# The default is plain http on a laptop. HTTPS_ONLY is for production: see docs/settings.md#in-production.
HTTPS_ONLY = _flag("HTTPS_ONLY", False)
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _flag("SECURE_COOKIES", HTTPS_ONLY)
SECURE_SSL_REDIRECT = HTTPS_ONLY
# Load balancers check these over plain http.
SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^readyz$"]
SECURE_HSTS_SECONDS = int(_number("HSTS_SECONDS", 365 * 86_400 if HTTPS_ONLY else 0, 0, 10 * 365 * 86_400))
SECURE_HSTS_INCLUDE_SUBDOMAINS = _flag("HSTS_SUBDOMAINS", False)
SECURE_HSTS_PRELOAD = _flag("HSTS_PRELOAD", False)
# Number of proxies in front of the site that set X-Forwarded-For and X-Forwarded-Proto. With 0 neither header is read,
# because clients could send them.
NUM_PROXIES = int(_number("NUM_PROXIES", 0, 0, 10))
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if NUM_PROXIES else None

# backend/http.py adds the sources of the admin's pages.
SECURE_CSP = {
    "default-src": ["'none'"],
    "script-src": ["'self'"],
    "style-src": ["'self'"],
    # The icons in Swagger UI's style sheet are data: URLs.
    "img-src": ["'self'", "data:"],
    "font-src": ["'self'"],
    "connect-src": ["'self'"],
    "form-action": ["'self'"],
    "frame-ancestors": ["'none'"],
    "base-uri": ["'none'"],
}
# A page of any site may send a rating with a token or a publishable key. No other address answers other sites.
CORS_URLS_REGEX = r"^/api/feedback/"
CORS_ALLOW_ALL_ORIGINS = True
CORS_ALLOW_METHODS = ["POST"]
CORS_ALLOW_HEADERS = ["authorization", "content-type"]
CORS_EXPOSE_HEADERS = ["Retry-After"]
FEEDBACK_TOKEN_DAYS = _number("FEEDBACK_TOKEN_DAYS", 30, 0.001, 3650)
DATA_UPLOAD_MAX_MEMORY_SIZE = limits.BODY_BYTES
# Limits of a file on the import page. A small archive may unpack to many rows. The import command has no limits.
FEEDBACK_UPLOAD_MAX_BYTES = limits.UPLOAD_BYTES
UPLOAD_PAGES = ("import", "start-bring", "v1-files")
FEEDBACK_UPLOAD_MAX_ROWS = limits.UPLOAD_ROWS

# --- Applications -----------------------------------------------------------------------------------------
INSTALLED_APPS = [
    "unfold",
    "django.contrib.admin.apps.SimpleAdminConfig",  # backend.urls runs autodiscover
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rl",
    "django_q",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "corsheaders",
    "axes",
    "feedback",
]

MIDDLEWARE = [
    "corsheaders.middleware.CorsMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "backend.http.ContentSecurityPolicy",
    "backend.http.BodyLimit",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "axes.middleware.AxesMiddleware",
    "backend.rest.errors.MethodPages",
]

ROOT_URLCONF = "backend.urls"
WSGI_APPLICATION = "backend.wsgi.application"

ARTIFACT_STORE = os.environ.get("ARTIFACT_STORE") or ""
STORAGES = {**global_settings.STORAGES, **_artifact_storage(ARTIFACT_STORE)}

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [bundled_folder("templates")],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "rl.views.context.frame",
            ],
            "builtins": ["backend.template_tags"],
        },
    }
]

# --- Database ---------------------------------------------------------------------------------------------
DATABASE_URL = os.environ.get("DATABASE_URL") or f"sqlite:///{RATCHET_HOME / 'ratchet.sqlite3'}"
try:
    _database: dict[str, Any] = dict(
        dj_database_url.parse(DATABASE_URL, conn_max_age=60, conn_health_checks=True)
    )
except ValueError as error:
    raise ImproperlyConfigured(
        f"DATABASE_URL must look like postgres://user:password@host:5432/name or sqlite:///path; {error}"
    ) from error
if _database["ENGINE"] == "django.db.backends.sqlite3":
    if os.environ.get("DATABASE_URL") and not _database["NAME"].startswith((":memory:", "file:")):
        _database["NAME"] = str(Path(_database["NAME"]).absolute())
        # Absolute for child processes, like the paths above.
        _query = DATABASE_URL[len(DATABASE_URL.partition("?")[0]) :]
        os.environ["DATABASE_URL"] = f"sqlite:///{quote(_database['NAME'])}{_query}"
    # WAL lets readers and one writer work at once. IMMEDIATE waits for the write lock at BEGIN. Without it, a
    # transaction could fail in its middle with "database is locked".
    _database["OPTIONS"] = {
        "timeout": 30,
        "transaction_mode": "IMMEDIATE",
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA foreign_keys=ON;",
    }
# A pool that hands out a connection per transaction (pgbouncer) loses a cursor that outlives one.
_database["DISABLE_SERVER_SIDE_CURSORS"] = _flag("DATABASE_POOLED", False)
DATABASES = {"default": _database}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# --- People -----------------------------------------------------------------------------------------------
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
]
# Limits of failed sign-ins, counted by django-axes (feedback/accounts/sign_in.py)
AXES_FAILURE_LIMIT = int(_number("SIGN_IN_FAILURES", 10, 1, 1_000_000))
SIGN_IN_FAILURES_OF_ADDRESS = int(_number("SIGN_IN_FAILURES_OF_ADDRESS", 50, 1, 1_000_000))
AXES_COOLOFF_TIME = timedelta(seconds=_number("SIGN_IN_WAIT_S", 900, 1, 7 * 86_400))
AXES_LOCKOUT_PARAMETERS = ["username", "ip_address"]
AXES_HANDLER = "feedback.accounts.sign_in.BrakeHandler"
AXES_LOCKOUT_CALLABLE = "feedback.accounts.sign_in.refused_response"
AXES_CLIENT_IP_CALLABLE = "backend.http.client_address"
# Tries during a lockout do not extend it. Otherwise somebody else could lock a person out for ever.
AXES_RESET_COOL_OFF_ON_FAILURE_DURING_LOCKOUT = False
AXES_DISABLE_ACCESS_LOG = True
AXES_ENABLE_ADMIN = False
AXES_VERBOSE = False
AXES_SENSITIVE_PARAMETERS = ["username", "ip_address", "csrfmiddlewaretoken"]
# Sign-in by OpenID Connect (feedback/accounts/oidc.py); off without an issuer
OIDC_ISSUER = (os.environ.get("OIDC_ISSUER") or "").rstrip("/")
OIDC_NAME = (os.environ.get("OIDC_NAME") or "single sign-on") if OIDC_ISSUER else ""
OIDC_GROUPS_CLAIM = os.environ.get("OIDC_GROUPS_CLAIM") or "groups"
OIDC_ROLES = _pairs("OIDC_ROLES")
if unknown := set(OIDC_ROLES.values()) - {"rater", "operator", "admin"}:
    raise ImproperlyConfigured(
        f"OIDC_ROLES: expected rater, operator or admin, found {', '.join(sorted(unknown))}"
    )
if OIDC_ISSUER:
    if find_spec("allauth") is None:
        raise ImproperlyConfigured('OIDC_ISSUER needs one more package: pip install ".[oidc]"')
    INSTALLED_APPS += ["allauth", "allauth.account", "allauth.socialaccount"]
    INSTALLED_APPS += ["allauth.socialaccount.providers.openid_connect"]
    MIDDLEWARE += ["allauth.account.middleware.AccountMiddleware"]
    AUTHENTICATION_BACKENDS += ["allauth.account.auth_backends.AuthenticationBackend"]
    _client = {"client_id": os.environ.get("OIDC_CLIENT_ID"), "secret": os.environ.get("OIDC_CLIENT_SECRET")}
    if not all(_client.values()):
        raise ImproperlyConfigured("OIDC_ISSUER needs OIDC_CLIENT_ID and OIDC_CLIENT_SECRET")
    _app = {"provider_id": "sso", "name": OIDC_NAME, **_client, "settings": {"server_url": OIDC_ISSUER}}
    SOCIALACCOUNT_PROVIDERS = {"openid_connect": {"OAUTH_PKCE_ENABLED": True, "APPS": [_app]}}
    SOCIALACCOUNT_ADAPTER = "feedback.accounts.oidc.Adapter"
    SOCIALACCOUNT_LOGIN_ON_GET = True  # a link: pages forbid forms that lead elsewhere
    ACCOUNT_EMAIL_VERIFICATION = "none"
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "login"

# Messages are stored in the session. Cookie storage would make a signer for each request, also of the API.
MESSAGE_STORAGE = "django.contrib.messages.storage.session.SessionStorage"

# --- Language, time, files --------------------------------------------------------------------------------
LANGUAGE_CODE = "en-us"
FORMAT_MODULE_PATH = "backend.formats"
TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "static/"
STATICFILES_DIRS = [bundled_folder("static")]
# Static files are served from the source folders, so a clone works without collectstatic.
WHITENOISE_USE_FINDERS = True


# --- REST -------------------------------------------------------------------------------------------------
def _rates(knobs: Mapping[str, object]) -> dict[str, str]:
    """Most requests per scope and caller of a server process. `throttle_<scope>` in RATCHET_CONFIG changes one."""
    rates = {"ingest": "60000/min", "rate": "60000/min", "read": "6000/min", "operate": "120/min"}
    rates |= {"feedback_token": "30/min", "feedback_address": "300/min"}
    return {scope: str(knobs.get(f"throttle_{scope}", rate)) for scope, rate in rates.items()}


REST_FRAMEWORK: Mapping[str, object] = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "feedback.accounts.authentication.KeyAuthentication",
        "feedback.accounts.authentication.RoleAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["backend.rest.access.HasScope"],
    "DEFAULT_THROTTLE_CLASSES": ["backend.rest.access.ScopeThrottle"],
    "DEFAULT_THROTTLE_RATES": _rates(RATCHET_CONFIG.get("feedback", {})),
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["backend.rest.reading.StrictJSONParser"],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "backend.rest.reading.AlwaysJSON",
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    # None: OPTIONS gets 405, like any other unknown method.
    "DEFAULT_METADATA_CLASS": None,
    "EXCEPTION_HANDLER": "backend.rest.errors.exception_handler",
    # Exports use the parameter `format` themselves.
    "URL_FORMAT_OVERRIDE": None,
}
SPECTACULAR_SETTINGS: Mapping[str, object] = {
    "TITLE": "Ratchet",
    "DESCRIPTION": "Decisions in, ratings in, better policies out. Every error is "
    '`{"error": {"code", "message", "fields"}}`; docs/api.md explains the endpoints with examples.',
    "VERSION": RATCHET_VERSION,
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "DISABLE_DOCSTRING_DESCRIPTIONS": True,
    "SERVE_AUTHENTICATION": [],
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "POSTPROCESSING_HOOKS": [],
    # the order of the page: what an app sends first
    "TAGS": [
        {"name": name}
        for name in ("decisions", "ratings", "traces", "imports", "rewards", "policies", "upstreams")
    ],
}

# --- Background work --------------------------------------------------------------------------------------
REDIS_URL = os.environ.get("REDIS_URL") or ""
_LONGEST_RUN_S = 24 * 3600
Q_CLUSTER: Mapping[str, object] = {
    "name": "ratchet",
    "workers": 1,
    # The default cluster runs the schedules and short jobs. timeout < retry: a running job is not delivered again.
    "timeout": 600,
    "retry": 900,
    "max_attempts": 1,
    "catch_up": False,
    "save_limit": 250,
    "label": "Workers",
    # This cluster trains, one run at a time on each machine: `manage.py serve --only training`.
    "ALT_CLUSTERS": {
        "training": {
            "workers": 1,
            "timeout": _LONGEST_RUN_S,
            "retry": _LONGEST_RUN_S + 3600,
            "max_attempts": 1,
            "catch_up": False,
        }
    },
    **({"redis": REDIS_URL} if REDIS_URL else {"orm": "default"}),
}

# --- Notices ----------------------------------------------------------------------------------------------
NOTIFY_WEBHOOK = os.environ.get("NOTIFY_WEBHOOK") or ""
if NOTIFY_WEBHOOK and not NOTIFY_WEBHOOK.startswith(("http://", "https://")):
    raise ImproperlyConfigured(f"NOTIFY_WEBHOOK must be an http(s) address, found {NOTIFY_WEBHOOK!r}")
NOTIFY_PRIVATE = _flag("NOTIFY_PRIVATE", False)
# Spans and metrics out (rl/serving/telemetry.py); the SDK reads the other variables of OpenTelemetry itself
OTEL_EXPORTS = bool(os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"))
OTEL_SERVICE_NAME = os.environ.get("OTEL_SERVICE_NAME") or "ratchet"
OTEL_CONTENT = _flag("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", False)
if OTEL_EXPORTS and find_spec("opentelemetry.sdk") is None:
    raise ImproperlyConfigured('OTEL_EXPORTER_OTLP_ENDPOINT needs two more packages: pip install ".[otlp]"')
# Runs, evaluations and champions in MLflow (rl/tracking.py); its client reads its other variables itself
MLFLOW_TRACKING_URI = os.environ.get("MLFLOW_TRACKING_URI") or ""
for _name, _value in (
    ("DISABLE_TELEMETRY", "true"),
    ("HTTP_REQUEST_MAX_RETRIES", "1"),
    ("HTTP_REQUEST_TIMEOUT", "20"),
    ("SUPPRESS_PRINTING_URL_TO_STDOUT", "true"),
):
    os.environ.setdefault(f"MLFLOW_{_name}", _value)
if MLFLOW_TRACKING_URI and find_spec("mlflow") is None:
    raise ImproperlyConfigured('MLFLOW_TRACKING_URI needs one more package: pip install ".[mlflow]"')
if "@" in MLFLOW_TRACKING_URI:  # its client writes the address into errors, and so into logs
    raise ImproperlyConfigured(
        "MLFLOW_TRACKING_URI must hold no password: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    )
SLACK_SIGNING_SECRET = os.environ.get("SLACK_SIGNING_SECRET") or ""
OPENWEBUI_WEBHOOK_SECRET = os.environ.get("OPENWEBUI_WEBHOOK_SECRET") or ""
if not re.fullmatch(r"(whsec_)?[A-Za-z0-9+/]{32,}={0,2}|", OPENWEBUI_WEBHOOK_SECRET):
    raise ImproperlyConfigured("OPENWEBUI_WEBHOOK_SECRET must be whsec_ and at least 24 bytes in base64")
NOTIFY_EMAIL = [a.strip() for a in os.environ.get("NOTIFY_EMAIL", "").split(",") if a.strip()]
EMAIL_HOST = os.environ.get("EMAIL_HOST") or "localhost"
EMAIL_PORT = int(_number("EMAIL_PORT", 25, 1, 65_535))
EMAIL_HOST_USER = os.environ.get("EMAIL_HOST_USER") or ""
EMAIL_HOST_PASSWORD = os.environ.get("EMAIL_HOST_PASSWORD") or ""
EMAIL_USE_TLS, EMAIL_USE_SSL = _flag("EMAIL_USE_TLS", False), _flag("EMAIL_USE_SSL", False)
if EMAIL_USE_TLS and EMAIL_USE_SSL:
    raise ImproperlyConfigured(
        "expected EMAIL_USE_TLS (STARTTLS) or EMAIL_USE_SSL (TLS from the start), found both"
    )
EMAIL_TIMEOUT = 10  # seconds; a mail server that hangs must not delay the steps after a run
DEFAULT_FROM_EMAIL = os.environ.get("EMAIL_FROM") or "ratchet@localhost"

# --- Plugins ----------------------------------------------------------------------------------------------
# Dotted paths, separated by commas. Installed packages add theirs as entry points: see backend.plugins.
RATCHET_AGENTS = _paths("RATCHET_AGENTS")
RATCHET_BENCHMARKS = _paths("RATCHET_BENCHMARKS")
RATCHET_EXPORTERS = _paths("RATCHET_EXPORTERS")
RATCHET_FORMATS = _paths("RATCHET_FORMATS")
RATCHET_REWARDS = _paths("RATCHET_REWARDS")

# --- Functions of rl that feedback calls without importing rl -------------------------------------------------
# Each is a dotted path.
# slug -> facts about the agent: title, suggested tags, preview template
FEEDBACK_AGENT_FACTS = "rl.agents.agent_facts"
# slug -> all responses of an agent with a closed set of answers, otherwise none
FEEDBACK_CLOSED_ANSWERS = "rl.models.agent_definitions.closed_answers_of"
# (decision id, policy name) -> LinkedFacts of feedback.explorer.decision_facts; empty: no reward is shown
FEEDBACK_DECISION_FACTS = "rl.views.context.facts_of"
# {agent: prompt hashes} -> training snapshots that hold these prompts
FEEDBACK_SNAPSHOTS_CONTAINING = "rl.datasets.erasure.snapshots_containing"
# Called with ({agent: prompt hashes}, since). Returns the trainings since then that used these prompts. If this setting
# is empty, an import is undone without asking.
FEEDBACK_TRAINED_ON = "rl.datasets.erasure.trained_on"
# A module, feedback.agents.AgentKeeper: deletes an agent's other data; empty: only rows change
FEEDBACK_AGENT_KEEPER = "rl.registry.files"
# (decision ids): deletes other data of these decisions, in the same transaction
FEEDBACK_FORGET = "rl.datasets.erasure.decisions_forget"
# (feedback.erasure.marks.Marks, dry_run) -> {place: count}: erases, or counts, other copies of erased text
FEEDBACK_ERASURE = "rl.datasets.erasure.copies_erase"
# A module, feedback.rating.pair_views.JudgingPages: the judging rounds of `/rate/pairs/?round=`; empty: no rounds
FEEDBACK_JUDGING = "rl.views.judging"
# [decision ids] -> {id: raw reward in [-2, 2]}, for `export_training_data --min-reward`. A decision without a reward
# counts with its mean rating; empty: all decisions do.
FEEDBACK_REWARDS = "rl.datasets.reward_records.raw_rewards"
# (decisions, least raw reward) -> the decisions with at least this reward, for searches
FEEDBACK_REWARDED = "rl.datasets.reward_records.rewarded_at_least"

# Settings of agents without a row in the admin: fields of feedback.models.AgentSettings.
FEEDBACK_AGENT_DEFAULTS = {
    name: value
    for name, value in RATCHET_CONFIG.get("feedback", {}).items()
    if not name.startswith("throttle_")
}

# Seconds for which a process caches API keys and agents' settings. A revoked key stops working within them.
FEEDBACK_REMEMBER_S = 5.0
# An entry used in the second half of that time is read again in the background.
FEEDBACK_RENEW_AHEAD = True

# --- Serving ----------------------------------------------------------------------------------------------
# Backends that answer for policies trained here and for base models, tried in this order: `in-process` (llama.cpp), or
# addresses of the team's own OpenAI-compatible servers. A hosted policy is answered only by its upstream.
LOCAL_BACKENDS = [
    b.strip() for b in (os.environ.get("LOCAL_BACKENDS") or "in-process").split(",") if b.strip()
]
for _backend in LOCAL_BACKENDS:
    if _backend != "in-process" and not _backend.startswith(("http://", "https://")):
        raise ImproperlyConfigured(
            f"LOCAL_BACKENDS must list `in-process` and http(s) addresses such as http://localhost:11434/v1, "
            f"found {_backend!r}"
        )
# Agents that the gateway creates at their first request: slugs or patterns such as `team-*`; `*` is any.
GATEWAY_NEW_AGENTS = [
    name.strip() for name in (os.environ.get("GATEWAY_NEW_AGENTS") or "").split(",") if name.strip()
]
# Names of other models that a fine-tuning job may ask for, and the base model that each stands for, such as
# `gpt-4o-mini*=smollm2,gpt-4.1-nano*=bundled`.
FINE_TUNING_MODELS = {
    name.strip(): base.strip()
    for name, _, base in (
        pair.partition("=")
        for pair in (os.environ.get("FINE_TUNING_MODELS") or "").split(",")
        if pair.strip()
    )
}
if not all(name and base for name, base in FINE_TUNING_MODELS.items()):
    raise ImproperlyConfigured("FINE_TUNING_MODELS must list name=base model, such as gpt-4o-mini*=smollm2")
# Whether to answer or refuse when neither the database nor the disk can store the decision.
GATEWAY_WITHOUT_RECORDING = (os.environ.get("GATEWAY_WITHOUT_RECORDING") or "answer").strip().lower()
if GATEWAY_WITHOUT_RECORDING not in ("answer", "refuse"):
    raise ImproperlyConfigured(
        f"GATEWAY_WITHOUT_RECORDING must be answer or refuse, found {GATEWAY_WITHOUT_RECORDING!r}"
    )
# RATCHET_HOME as these servers see it: vLLM reads adapters from there.
ENGINE_HOME = Path(os.environ.get("ENGINE_HOME") or RATCHET_HOME)
LOCAL_API_KEY = (os.environ.get("LOCAL_API_KEY") or "").strip()
if not (LOCAL_API_KEY.isascii() and LOCAL_API_KEY.isprintable()):
    raise ImproperlyConfigured("LOCAL_API_KEY must be one line of letters, digits and signs")
# Reads the environment variable that holds an upstream's API key.
UPSTREAM_KEY_OF = os.environ.get
SERVING_TIMEOUT_S = _number("SERVING_TIMEOUT_S", 60.0, 0.1, 3600.0)
# Seconds that a promotion may take to write the files of its policy.
SERVING_PREPARE_TIMEOUT_S = _number("SERVING_PREPARE_TIMEOUT_S", 600.0, 1.0, 86_400.0)
SERVING_QUEUE = int(_number("SERVING_QUEUE", 64, 0, 100_000))
SERVING_CONTEXT = int(_number("SERVING_CONTEXT", 4096, 64, 10_000_000))
SERVING_CACHE_MB = int(_number("SERVING_CACHE_MB", 1024, 1, 1e6))
# prometheus_client reads this variable at import: the folder where all web processes count.
PROMETHEUS_MULTIPROC_DIR = os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", str(RATCHET_HOME / "metrics"))
SERVING_QUANTIZATION = os.environ.get("SERVING_QUANTIZATION") or "auto"

# --- Logging ----------------------------------------------------------------------------------------------
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {
            "()": "backend.logs.SecretsHidden",
            "format": "{asctime} {levelname} {name}: {message}",
            "style": "{",
        }
    },
    "filters": {"outages": {"()": "backend.logs.OutagesOnOneLine"}},
    # Always stderr: stdout is for a command's answer.
    "handlers": {"stderr": {"class": "logging.StreamHandler", "stream": sys.stderr, "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
    "loggers": {
        "feedback": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
        "rl": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
        # warns at each import that an optional kernel package is missing
        "bitsandbytes": {"level": "ERROR"},
        # warns five times without a network; Ratchet's own message says it once
        "huggingface_hub.utils._http": {"level": "ERROR"},
        "backend": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
        "django-q": {"filters": ["outages"]},
    },
}


UNFOLD = {
    "SITE_TITLE": "Ratchet",
    "SITE_HEADER": "Ratchet",
    "SITE_SUBHEADER": "Decisions in, better policies out",
    "SITE_URL": "/",
    "SITE_ICON": lambda request: static("favicon.svg"),
    "SITE_FAVICONS": [
        {"rel": "icon", "type": "image/svg+xml", "href": lambda request: static("favicon.svg")}
    ],
    "STYLES": [
        lambda request: static("frame.css"),
        lambda request: static("rl/admin.css"),
        lambda request: static("rl/admin_colors.css"),
    ],
    "SCRIPTS": [lambda request: static("rl/admin.js")],
    # Unfold writes the colours into every page as an inline style, which the Content-Security-Policy refuses; they lie
    # in static/rl/admin_colors.css
    "GLOBAL_CALLBACK": "backend.admin_navigation.page_context",
    "DASHBOARD_CALLBACK": "backend.admin_navigation.index_context",
    # Django's log of edits stays empty where nothing can be edited; a policy's history are its events
    "SHOW_HISTORY": False,
    "SIDEBAR": {
        "show_search": True,
        "navigation": NAVIGATION,
    },
}
