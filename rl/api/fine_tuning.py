"""OpenAI's endpoints for fine-tuning: files, jobs, their events and checkpoints, and deleting a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.http import FileResponse, HttpResponse
from django.http.response import HttpResponseBase
from pydantic import Field
from rest_framework.exceptions import UnsupportedMediaType
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import INT_TEXT, Query, Sent
from backend.rest.access import grant_of
from backend.rest.errors import BodyTooLarge, RequestRefused
from backend.rest.reading import StrictJSONParser, body_read, query_read
from rl.api.gateway import OpenAIView
from rl.fine_tuning import shown
from rl.fine_tuning.bodies import JobSettings, ModelName
from rl.fine_tuning.files import FineTuningRefused, UnknownObject, file_delete, file_get, file_store, files_of
from rl.fine_tuning.jobs import JobOrder, job_cancel, job_create, job_get, jobs_of
from rl.models import FineTuningJob, TrainingFile

PURPOSE, RESULTS = "fine-tune", "fine-tune-results"
T = TypeVar("T")


# --- Files --------------------------------------------------------------------------------------------------


class FilesQuery(Query):
    purpose: str = ""
    limit: Annotated[int, Field(ge=1, le=10_000), INT_TEXT] = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: str = ""


class Upload(Sent):
    """The fields of the form beside the file."""

    purpose: Literal["fine-tune"]


class Files(OpenAIView):
    scopes = {"GET": "read", "POST": "operate"}
    # JSON is parsed too, so that a session without its token is told so first
    parser_classes = [MultiPartParser, StrictJSONParser]

    def initial(self, request: Request, *args: object, **kwargs: object) -> None:
        # by its stated length, before a byte of it is read
        length, most = request.META.get("CONTENT_LENGTH") or "0", settings.FEEDBACK_UPLOAD_MAX_BYTES
        if length.isdigit() and int(length) > most:
            raise BodyTooLarge(f"file: expected at most {most >> 20} MiB; split the file into several jobs")
        super().initial(request, *args, **kwargs)

    def get(self, request: Request) -> Response:
        sent = query_read(FilesQuery, request)
        found = files_of(_caller(request)).order_by("id" if sent.order == "asc" else "-id")
        if sent.purpose not in ("", PURPOSE):
            found = found.none()  # results are read by the ids that their job names
        return Response(_page(list(found), lambda file: file.name, sent.after, sent.limit, _file_represent))

    def post(self, request: Request) -> Response:
        if not (request.content_type or "").startswith(MultiPartParser.media_type):
            raise UnsupportedMediaType(request.content_type or "")
        form: Mapping[str, Any] = request.data  # type: ignore[assignment]
        files = request.FILES.getlist("file")
        fields = {name: form[name] for name in form if name not in request.FILES}
        body_read(Upload, fields)
        if len(files) != 1 or not isinstance(files[0], UploadedFile):
            raise FineTuningRefused("file", f"expected one file, found {len(files)}")
        name = PurePosixPath(files[0].name or "file").name
        stored = file_store(files[0].chunks(), _storable(name), actor=grant_of(request).ident)
        return Response(_file_represent(stored))


class FileOne(OpenAIView):
    scopes = {"GET": "read", "DELETE": "operate"}

    def get(self, request: Request, name: str) -> Response:
        query_read(Query, request)
        if (result := shown.result_file_get(name, _caller(request))) is not None:
            return Response(_result_represent(result))
        return Response(_file_represent(file_get(name, _caller(request))))

    def delete(self, request: Request, name: str) -> Response:
        query_read(Query, request)
        if shown.result_file_get(name, _caller(request)) is not None:
            raise FineTuningRefused("file_id", "a job's results belong to its run and cannot be deleted")
        file_delete(file_get(name, _caller(request)))
        return Response({"id": name, "object": "file", "deleted": True})


class FileContent(OpenAIView):
    scopes = {"GET": "read"}

    def get(self, request: Request, name: str) -> HttpResponseBase:
        query_read(Query, request)
        headers = {"X-Content-Type-Options": "nosniff"}
        if (result := shown.result_file_get(name, _caller(request))) is not None:
            return HttpResponse(result.content, content_type="application/octet-stream", headers=headers)
        try:
            stream = file_get(name, _caller(request)).path.open("rb")
        except FileNotFoundError as error:
            raise UnknownObject("file_id", f"the content of {name[:80]} is gone") from error
        return FileResponse(stream, content_type="application/octet-stream", headers=headers)


def _caller(request: Request) -> str | None:
    """Whose files and jobs a request may see: a key's its own, a person's all."""
    grant = grant_of(request)
    return None if grant.is_person else grant.ident


def _file_represent(file: TrainingFile) -> dict[str, Any]:
    try:
        size = file.path.stat().st_size  # `forget` may have changed it
    except FileNotFoundError:
        size = 0
    return _file_object(file.name, file.filename, file.created_at, size, PURPOSE)


def _result_represent(file: shown.ResultFile) -> dict[str, Any]:
    return _file_object(file.id, file.filename, file.created_at, len(file.content), RESULTS)


def _file_object(id: str, filename: str, at: datetime, size: int, purpose: str) -> dict[str, Any]:
    return {
        "id": id,
        "object": "file",
        "bytes": size,
        "created_at": _seconds(at),
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
    }


def _storable(name: str) -> str:
    return name.replace("\x00", "").encode("utf-8", "replace").decode()


# --- Jobs ---------------------------------------------------------------------------------------------------


class JobSent(JobSettings):
    model: ModelName
    training_file: str
    validation_file: str = ""
    integrations: list[object] = []


class ListQuery(Query):
    after: str = ""
    limit: Annotated[int, Field(ge=1, le=100), INT_TEXT] = 20


class Jobs(OpenAIView):
    scopes = {"GET": "read", "POST": "operate"}

    def get(self, request: Request) -> Response:
        wanted = _metadata_wanted(request)
        sent = query_read(ListQuery, request, apart=[name for name, _, _ in wanted])
        caller = _caller(request)
        found = jobs_of(caller).prefetch_related("run__metrics")
        if sent.after:
            found = found.filter(pk__lt=job_get(sent.after, caller).pk)
        # the database would read a key of digits as the place in a list
        jobs = (
            job
            for job in found.iterator(sent.limit + 1)
            if all(job.metadata.get(key) == value for _, key, value in wanted)
        )
        return Response(_page(list(islice(jobs, sent.limit + 1)), _job_id, "", sent.limit, _job_represent))

    def post(self, request: Request) -> Response:
        grant = grant_of(request)
        return Response(_job_represent(job_create(_order(request), actor=grant.holder, caller=grant.ident)))


class JobOne(OpenAIView):
    scopes = {"GET": "read"}

    def get(self, request: Request, name: str) -> Response:
        query_read(Query, request)
        return Response(_job_represent(job_get(name, _caller(request))))


class JobCancel(OpenAIView):
    scopes = {"POST": "operate"}

    def post(self, request: Request, name: str) -> Response:
        job = job_get(name, _caller(request))
        return Response(_job_represent(job_cancel(job, actor=grant_of(request).holder)))


class JobEvents(OpenAIView):
    scopes = {"GET": "read"}

    def get(self, request: Request, name: str) -> Response:
        sent = query_read(ListQuery, request)
        events = shown.job_events(job_get(name, _caller(request)))
        return Response(_page(events, lambda event: event.id, sent.after, sent.limit, _event_represent))


class JobCheckpoints(OpenAIView):
    scopes = {"GET": "read"}

    def get(self, request: Request, name: str) -> Response:
        query_read(ListQuery, request)
        job = job_get(name, _caller(request))
        kept = shown.checkpoint_of(job)
        rows = [_checkpoint_represent(job, kept)] if kept else []
        return Response(_page(rows, lambda row: str(row["id"]), "", 20, dict))


def _order(request: Request) -> JobOrder:
    sent, caller = body_read(JobSent, request.data), _caller(request)
    if sent.integrations:
        raise FineTuningRefused("integrations", "none is supported: leave it out")
    training = file_get(sent.training_file, caller, "training_file")
    validation = file_get(sent.validation_file, caller, "validation_file") if sent.validation_file else None
    return sent.order(sent.model, training, validation)


def _metadata_wanted(request: Request) -> list[tuple[str, str, str]]:
    """The filters `metadata[key]=value` as (parameter, key, value)."""
    return [
        (name, found[1], str(value))
        for name, value in request.query_params.items()
        if (found := re.fullmatch(r"metadata\[([^\]]{1,64})\]", name))
    ]


def _job_id(job: FineTuningJob) -> str:
    return job.name


def _job_represent(job: FineTuningJob) -> dict[str, Any]:
    policy, run = shown.tuned_policy(job), job.run
    ended = run.finished_at if shown.job_status(job) in ("succeeded", "failed", "cancelled") else None
    return {
        "id": job.name,
        "object": "fine_tuning.job",
        "created_at": _seconds(job.created_at),
        "error": shown.job_error(job),
        "fine_tuned_model": job.tuned_model if policy else None,
        "finished_at": _seconds(ended) if ended else None,
        "hyperparameters": shown.hyperparameters_shown(job),
        "model": job.model,
        "organization_id": run.agent,
        "result_files": shown.result_names(job),
        "status": shown.job_status(job),
        "trained_tokens": shown.trained_tokens(job),
        "training_file": job.training_file,
        "validation_file": job.validation_file or None,
        "integrations": [],
        "seed": run.recipe.get("seed", run.seed),
        "estimated_finish": None,
        "method": shown.method_shown(job),
        "metadata": job.metadata,
    }


def _event_represent(event: shown.Event) -> dict[str, Any]:
    return {
        "id": event.id,
        "object": "fine_tuning.job.event",
        "created_at": _seconds(event.at),
        "level": event.level,
        "message": event.message,
        "type": "metrics" if "step" in event.data else "message",
        "data": dict(event.data),
    }


def _checkpoint_represent(job: FineTuningJob, kept: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"ftckpt-{job.key}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": _seconds(job.run.finished_at or job.created_at),
        "fine_tuned_model_checkpoint": job.tuned_model,
        "fine_tuning_job_id": job.name,
        "metrics": kept["metrics"],
        "step_number": kept["step"],
    }


def _page(
    rows: Sequence[T],
    id_of: Callable[[T], str],
    after: str,
    limit: int,
    represent: Callable[[T], dict[str, Any]],
) -> dict[str, object]:
    """A list as OpenAI's clients page through it: the rows after the one named."""
    if after:
        ids = [id_of(row) for row in rows]
        if after not in ids:
            fault = "expected the id of an item of this list"
            raise RequestRefused(f"after: {fault}, found {after[:80]!r}", fields={"after": fault})
        rows = rows[ids.index(after) + 1 :]
    page = rows[:limit]
    return {
        "object": "list",
        "data": [represent(row) for row in page],
        "first_id": id_of(page[0]) if page else None,
        "last_id": id_of(page[-1]) if page else None,
        "has_more": len(rows) > limit,
    }


def _seconds(at: datetime) -> int:
    return int(at.timestamp())
