"""Settings of the one Django project. The only place that reads os.environ (and `.env`)."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import dj_database_url
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
# oneDNN keeps a kernel with its working memory for each shape of product, 1,024 of them by default. With rows of many
# lengths these take gigabytes. It reads the number at the first product.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
# Child processes inherit the environment and run in BASE_DIR: a relative path would mean another file to them.
for _name in ("RATCHET_HOME", "RATCHET_CONFIG", "LLAMA_CPP_PATH"):
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


def _paths(name: str) -> list[str]:
    """Dotted paths with commas between."""
    return [path.strip() for path in os.environ.get(name, "").split(",") if path.strip()]


# --- Where things lie -------------------------------------------------------------------------------------
RATCHET_HOME = Path(os.environ.get("RATCHET_HOME") or default_home(os.environ)).expanduser().resolve()
home_private(RATCHET_HOME)
# Where Hugging Face's libraries keep what they fetched, so that a plan can look at a model's shape without them
HF_HUB_CACHE = Path(
    os.environ.get("HF_HUB_CACHE")
    or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
)
RATCHET_PROFILE = os.environ.get("RATCHET_PROFILE") or "auto"
# Methods of plugins come before RATCHET_CONFIG, which has a section for each; the other kinds once Django is set up.
RATCHET_METHODS = _paths("RATCHET_METHODS")
plugins_load("methods", RATCHET_METHODS)
try:
    _operator = operator_file(os.environ.get("RATCHET_CONFIG") or "", methods_missing=left_out("methods"))
except OperatorFileError as error:
    raise ImproperlyConfigured(str(error)) from error
# Section -> {knob: value}, and section -> the base model that is trained there
RATCHET_CONFIG = _operator.sections
RATCHET_BASE_MODELS = _operator.base_models
RATCHET_BASE_MODEL = os.environ.get("RATCHET_BASE_MODEL") or _operator.base_model or "bundled"


RATCHET_VERSION = VERSION
LLAMA_CPP_PATH = os.environ.get("LLAMA_CPP_PATH") or ""
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
# Plain http on a laptop is the default. HTTPS_ONLY is the production mode: docs/settings.md#in-production has it whole.
HTTPS_ONLY = _flag("HTTPS_ONLY", False)
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _flag("SECURE_COOKIES", HTTPS_ONLY)
SECURE_SSL_REDIRECT = HTTPS_ONLY
# Load balancers ask these over plain http, from inside
SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^readyz$"]
SECURE_HSTS_SECONDS = int(_number("HSTS_SECONDS", 365 * 86_400 if HTTPS_ONLY else 0, 0, 10 * 365 * 86_400))
SECURE_HSTS_INCLUDE_SUBDOMAINS = _flag("HSTS_SUBDOMAINS", False)
SECURE_HSTS_PRELOAD = _flag("HSTS_PRELOAD", False)
# Proxies in front of the site that add to X-Forwarded-For and set X-Forwarded-Proto. With none, clients could send both
# headers themselves, so neither is read.
NUM_PROXIES = int(_number("NUM_PROXIES", 0, 0, 10))
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if NUM_PROXIES else None

# backend/http.py adds what the admin needs
SECURE_CSP = {
    "default-src": ["'none'"],
    "script-src": ["'self'"],
    "style-src": ["'self'"],
    # data: is how Swagger UI's style sheet carries its icons
    "img-src": ["'self'", "data:"],
    "font-src": ["'self'"],
    "connect-src": ["'self'"],
    "form-action": ["'self'"],
    "frame-ancestors": ["'none'"],
    "base-uri": ["'none'"],
}
DATA_UPLOAD_MAX_MEMORY_SIZE = limits.BODY_BYTES
# Of a file given to the import page; the command takes any size
FEEDBACK_UPLOAD_MAX_BYTES = limits.UPLOAD_BYTES
# And of its rows: a small archive may unpack to many
FEEDBACK_UPLOAD_MAX_ROWS = limits.UPLOAD_ROWS

# --- Applications -----------------------------------------------------------------------------------------
INSTALLED_APPS = [
    "unfold",
    "django.contrib.admin.apps.SimpleAdminConfig",  # its pages are found with the addresses: no command needs them
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rl",  # before django_q: its qcluster is ours
    "django_q",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "axes",
    "feedback",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "backend.http.ContentSecurityPolicy",
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
ASGI_APPLICATION = "backend.asgi.application"

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
                "rl.views.context.guided_start",
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
        # for child processes, as the paths above
        _query = DATABASE_URL[len(DATABASE_URL.partition("?")[0]) :]
        os.environ["DATABASE_URL"] = f"sqlite:///{quote(_database['NAME'])}{_query}"
    # WAL lets readers and one writer work at once; IMMEDIATE takes the write lock at BEGIN, where waiting for it
    # works, instead of failing in the middle of a transaction with "database is locked".
    _database["OPTIONS"] = {
        "timeout": 30,
        "transaction_mode": "IMMEDIATE",
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA foreign_keys=ON;",
    }
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
# The brake on sign-in, counted by django-axes (feedback/accounts/sign_in.py)
AXES_FAILURE_LIMIT = int(_number("SIGN_IN_FAILURES", 10, 1, 1_000_000))
SIGN_IN_FAILURES_OF_ADDRESS = int(_number("SIGN_IN_FAILURES_OF_ADDRESS", 50, 1, 1_000_000))
AXES_COOLOFF_TIME = timedelta(seconds=_number("SIGN_IN_WAIT_S", 900, 1, 7 * 86_400))
AXES_LOCKOUT_PARAMETERS = ["username", "ip_address"]
AXES_HANDLER = "feedback.accounts.sign_in.BrakeHandler"
AXES_LOCKOUT_CALLABLE = "feedback.accounts.sign_in.refused_response"
AXES_CLIENT_IP_CALLABLE = "backend.http.client_address"
# who is sent away does not make it longer by trying: nobody can be kept out for ever by somebody else
AXES_RESET_COOL_OFF_ON_FAILURE_DURING_LOCKOUT = False
AXES_DISABLE_ACCESS_LOG = True
AXES_ENABLE_ADMIN = False
AXES_VERBOSE = False
AXES_SENSITIVE_PARAMETERS = ["username", "ip_address", "csrfmiddlewaretoken"]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "login"

# Messages lie in the session: a cookie's signer would be made for every request, of an API too.
MESSAGE_STORAGE = "django.contrib.messages.storage.session.SessionStorage"

# --- Language, time, files --------------------------------------------------------------------------------
LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "static/"
STATICFILES_DIRS = [bundled_folder("static")]
# Served straight from the source folders: a clone works without collectstatic, and no folder has to be there for it
WHITENOISE_USE_FINDERS = True


# --- REST -------------------------------------------------------------------------------------------------
def _rates(knobs: dict[str, Any]) -> dict[str, str]:
    """Requests per scope and caller that one server process takes; `throttle_<scope>` in RATCHET_CONFIG changes one."""
    rates = {"ingest": "60000/min", "rate": "60000/min", "read": "6000/min", "operate": "120/min"}
    return {scope: str(knobs.get(f"throttle_{scope}", rate)) for scope, rate in rates.items()}


REST_FRAMEWORK: dict[str, Any] = {
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
    # without it an OPTIONS request is answered 405 like any other method that is not there
    "DEFAULT_METADATA_CLASS": None,
    "EXCEPTION_HANDLER": "backend.rest.errors.exception_handler",
    # `format` is a parameter of exports here, not a way to ask for a renderer
    "URL_FORMAT_OVERRIDE": None,
}
SPECTACULAR_SETTINGS: dict[str, Any] = {
    "TITLE": "Ratchet",
    "DESCRIPTION": "Decisions in, ratings in, better policies out. Every error is "
    '`{"error": {"code", "message", "fields"}}`; docs/api.md explains the endpoints with examples.',
    "VERSION": RATCHET_VERSION,
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "DISABLE_DOCSTRING_DESCRIPTIONS": True,
    "SERVE_AUTHENTICATION": [],
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "POSTPROCESSING_HOOKS": ["feedback.api.schemas.hook", "rl.api.schemas.hook"],
}

# --- Background work --------------------------------------------------------------------------------------
REDIS_URL = os.environ.get("REDIS_URL") or ""
_LONGEST_RUN_S = 24 * 3600
Q_CLUSTER: dict[str, Any] = {
    "name": "ratchet",
    "workers": 1,
    # the default cluster turns the clock and does what is short; timeout < retry, so that a job that still works is
    # never delivered again
    "timeout": 600,
    "retry": 900,
    "max_attempts": 1,
    "catch_up": False,
    "save_limit": 250,
    "label": "Workers",
    # trains, one run at a time: `Q_CLUSTER_NAME=training python manage.py qcluster`, as many machines as there are
    "ALT_CLUSTERS": {
        "training": {
            "workers": 1,
            "timeout": _LONGEST_RUN_S,
            "retry": _LONGEST_RUN_S + 3600,
            "max_attempts": 1,
            "catch_up": False,
        }
    },
    **(
        {"redis": REDIS_URL}
        if REDIS_URL
        else {"orm": "default", "broker_class": "rl.jobs.queue_broker.WaitingOrm"}
    ),
}

# --- Notices ----------------------------------------------------------------------------------------------
NOTIFY_WEBHOOK = os.environ.get("NOTIFY_WEBHOOK") or ""
if NOTIFY_WEBHOOK and not NOTIFY_WEBHOOK.startswith(("http://", "https://")):
    raise ImproperlyConfigured(f"NOTIFY_WEBHOOK must be an http(s) address, found {NOTIFY_WEBHOOK!r}")
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
EMAIL_TIMEOUT = 10  # seconds; a mail server that hangs must not hold up what follows a run
DEFAULT_FROM_EMAIL = os.environ.get("EMAIL_FROM") or "ratchet@localhost"

# --- Plugins ----------------------------------------------------------------------------------------------
# Dotted paths with commas between, beside what installed packages name as entry points: see backend.plugins.
RATCHET_AGENTS = _paths("RATCHET_AGENTS")
RATCHET_BENCHMARKS = _paths("RATCHET_BENCHMARKS")
RATCHET_EXPORTERS = _paths("RATCHET_EXPORTERS")
RATCHET_FORMATS = _paths("RATCHET_FORMATS")
RATCHET_REWARDS = _paths("RATCHET_REWARDS")

# --- What feedback asks of the rest, without importing it ---------------------------------------------------
# Dotted path of a callable slug -> facts about the agent (title, suggested tags, preview template).
FEEDBACK_AGENT_FACTS = "rl.agents.agent_facts"
# Dotted path of a callable slug -> every response of an agent whose answers are a closed set, else none.
FEEDBACK_CLOSED_ANSWERS = "rl.models.agent_definitions.closed_answers_of"
# Dotted path of a callable (decision id, policy name) -> its reward and its policy's page, as
# feedback.explorer.decision_facts.DecisionFacts; empty: nothing is shown of them.
FEEDBACK_DECISION_FACTS = "rl.views.decision_facts.facts_of"
# Dotted path of a callable {agent: prompt hashes} -> the training snapshots that hold these prompts.
FEEDBACK_SNAPSHOTS_CONTAINING = "rl.datasets.erasure.snapshots_containing"
# Dotted path of a callable ({agent: prompt hashes}, since) -> what was trained on these prompts since then; empty: an
# import is taken back without asking.
FEEDBACK_TRAINED_ON = "rl.datasets.erasure.trained_on"
# Dotted path of the module that renames and deletes what else is kept of an agent, as
# feedback.agents.changes.AgentKeeper; empty: nothing but rows is.
FEEDBACK_AGENT_KEEPER = "rl.registry.files"
# Dotted path of a callable (decision ids): removes what else is kept of them, in the same transaction.
FEEDBACK_FORGET = "rl.datasets.erasure.decisions_forget"
# Dotted path of a callable (marks, dry_run) -> {place: count}: erases, or counts, copies of erased decisions' text that
# are kept elsewhere, as feedback.erasure.marks.Marks knows them.
FEEDBACK_ERASURE = "rl.datasets.erasure.copies_erase"

# Dotted path of the module with the page of `/rate/pairs/?round=` and the rounds that wait for a rater, as
# feedback.rating.pair_views.JudgingPages; empty: there are no rounds.
FEEDBACK_JUDGING = "rl.views.judging"

# Dotted path of a callable [decision ids] -> {id: raw reward in [-2, 2]}, for `export_training_data --min-reward`; of a
# decision without one, and of all where this is empty, the mean of what raters said.
FEEDBACK_REWARDS = "rl.datasets.reward_records.raw_rewards"
# Dotted path of a callable (decisions, least raw reward) -> those of them that earned as much, for searches.
FEEDBACK_REWARDED = "rl.datasets.reward_records.rewarded_at_least"

# An agent's settings where it has no row in the admin: fields of feedback.models.AgentSettings.
FEEDBACK_AGENT_DEFAULTS = {
    name: value
    for name, value in RATCHET_CONFIG.get("feedback", {}).items()
    if not name.startswith("throttle_")
}

# Seconds a process may go by what it read of API keys and of agents' settings: a revoked key ends within them.
FEEDBACK_REMEMBER_S = 5.0
# What is asked for in the second half of that time is read again beside the requests.
FEEDBACK_RENEW_AHEAD = True

# --- Serving ----------------------------------------------------------------------------------------------
# Where policies trained here, and base models, are answered, tried in this order: `in-process` (llama.cpp), or
# addresses of the team's own OpenAI-compatible servers. A hosted policy is answered by its upstream alone.
LOCAL_BACKENDS = [
    b.strip() for b in (os.environ.get("LOCAL_BACKENDS") or "in-process").split(",") if b.strip()
]
for _backend in LOCAL_BACKENDS:
    if _backend != "in-process" and not _backend.startswith(("http://", "https://")):
        raise ImproperlyConfigured(
            f"LOCAL_BACKENDS must list `in-process` and http(s) addresses such as http://localhost:11434/v1, "
            f"found {_backend!r}"
        )
# Agents the gateway may answer for although nobody set them up: slugs or patterns such as `team-*`; `*` is any.
GATEWAY_NEW_AGENTS = [
    name.strip() for name in (os.environ.get("GATEWAY_NEW_AGENTS") or "").split(",") if name.strip()
]
# What becomes of an answer whose decision neither the database nor the disk takes.
GATEWAY_WITHOUT_RECORDING = (os.environ.get("GATEWAY_WITHOUT_RECORDING") or "answer").strip().lower()
if GATEWAY_WITHOUT_RECORDING not in ("answer", "refuse"):
    raise ImproperlyConfigured(
        f"GATEWAY_WITHOUT_RECORDING must be answer or refuse, found {GATEWAY_WITHOUT_RECORDING!r}"
    )
LOCAL_API_KEY = (os.environ.get("LOCAL_API_KEY") or "").strip()
if not (LOCAL_API_KEY.isascii() and LOCAL_API_KEY.isprintable()):
    raise ImproperlyConfigured("LOCAL_API_KEY must be one line of letters, digits and signs")
# Reads the variable that an upstream names for its API key.
UPSTREAM_KEY_OF = os.environ.get
SERVING_TIMEOUT_S = _number("SERVING_TIMEOUT_S", 60.0, 0.1, 3600.0)
# Seconds a promotion may take to write the files its policy is served from.
SERVING_PREPARE_TIMEOUT_S = _number("SERVING_PREPARE_TIMEOUT_S", 600.0, 1.0, 86_400.0)
SERVING_QUEUE = int(_number("SERVING_QUEUE", 64, 0, 100_000))
SERVING_CONTEXT = int(_number("SERVING_CONTEXT", 4096, 64, 10_000_000))
SERVING_CACHE_MB = int(_number("SERVING_CACHE_MB", 1024, 1, 1e6))
# prometheus_client finds the folder in which all web processes count through the environment, when it is imported
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
    # stderr, always: stdout belongs to a command's answer
    "handlers": {"stderr": {"class": "logging.StreamHandler", "stream": sys.stderr, "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
    "loggers": {
        "feedback": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
        "rl": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
        # says at every import that an optional kernel package is not there
        "bitsandbytes": {"level": "ERROR"},
        # says five times over that there is no network; what we say of a model not found says it once
        "huggingface_hub.utils._http": {"level": "ERROR"},
        "backend": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
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
    "GLOBAL_CALLBACK": "backend.facts_admin.page_context",
    "DASHBOARD_CALLBACK": "backend.facts_admin.index_context",
    # Django's log of edits stays empty where nothing can be edited; a policy's history are its events
    "SHOW_HISTORY": False,
    "SIDEBAR": {
        "show_search": True,
        "navigation": NAVIGATION,
    },
}
