# syntax=docker/dockerfile:1
# Two images of one program: `web` answers requests and has no torch, `trainer` trains, judges and exports.
#   docker build --target web -t ratchet-web .
#   docker build --target trainer -t ratchet-trainer .

FROM python:3.11-slim-trixie AS build
# llama.cpp, which answers in process, is compiled
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /srv/ratchet
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
COPY requirements.txt requirements-rl.txt ./

FROM build AS build-web
# the web application and llama.cpp alone
RUN grep '^llama-cpp-python==' requirements-rl.txt > requirements-llama.txt \
    && pip install --prefer-binary -r requirements.txt -r requirements-llama.txt

FROM build-web AS build-trainer
RUN pip install --prefer-binary -r requirements-rl.txt

FROM python:3.11-slim-trixie AS runtime
# OpenMP for llama.cpp and torch; pg_dump and pg_restore for backups, as new as the server in compose.yaml
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 postgresql-client-17 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home ratchet \
    && install -d -o ratchet -g ratchet -m 0700 /data /backups
WORKDIR /srv/ratchet
# the counts of processes are files named by process id, which containers share: each container has a folder of its own
# (TOKENIZERS_PARALLELISM is no secret)
# hadolint ignore=DL3064
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENIZERS_PARALLELISM=false \
    HF_HUB_DISABLE_TELEMETRY=1 \
    HF_HOME=/data/huggingface \
    RATCHET_HOME=/data \
    PROMETHEUS_MULTIPROC_DIR=/tmp/ratchet-metrics
COPY . .

FROM runtime AS trainer
COPY --from=build-trainer /opt/venv /opt/venv
# the program starts, and every setting has a default
RUN RATCHET_HOME=/tmp/check python manage.py check && rm -rf /tmp/check
USER 10001:10001
VOLUME ["/data", "/backups"]
CMD ["python", "manage.py", "serve", "--only", "training"]

FROM runtime AS web
COPY --from=build-web /opt/venv /opt/venv
RUN RATCHET_HOME=/tmp/check python manage.py check && rm -rf /tmp/check
USER 10001:10001
VOLUME ["/data", "/backups"]
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --retries=4 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://localhost:8000/readyz', timeout=8)"]
CMD ["gunicorn", "backend.wsgi", "--bind", "0.0.0.0:8000", "--workers", "2", "--threads", "256", "--keep-alive", "130", "--worker-tmp-dir", "/dev/shm", "--no-control-socket", "--log-level", "warning"]
