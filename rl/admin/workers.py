"""The admin of the workers' queue: the pages of its library in this admin's clothes."""

from __future__ import annotations

from django.contrib import admin
from django_q import admin as queue_admin
from django_q.models import Failure, OrmQ, Schedule, Success
from unfold.admin import ModelAdmin


class SuccessAdmin(queue_admin.TaskAdmin, ModelAdmin):
    """Jobs that went through."""


class FailureAdmin(queue_admin.FailAdmin, ModelAdmin):
    """Jobs that broke off, with the error."""


class ScheduleAdmin(queue_admin.ScheduleAdmin, ModelAdmin):
    """Jobs that run by the clock."""


class QueueAdmin(queue_admin.QueueAdmin, ModelAdmin):
    """Jobs that wait for a worker."""


# Importing the library's pages has registered them: the queue's only where the database is the broker.
for model, page in (
    (Success, SuccessAdmin),
    (Failure, FailureAdmin),
    (Schedule, ScheduleAdmin),
    (OrmQ, QueueAdmin),
):
    if admin.site.is_registered(model):
        admin.site.unregister(model)
        admin.site.register(model, page)
