"""Addresses of this application."""

from __future__ import annotations

from django.urls import path

from rl import views

urlpatterns = [
    path("", views.home, name="home"),
    path("runs/", views.runs, name="runs"),
    path("runs/<int:pk>/", views.run, name="run"),
]
