"""Addresses of signing in and out, below /accounts/."""

from __future__ import annotations

from django.contrib.auth import views as auth_views
from django.urls import path

from feedback.accounts import views

urlpatterns = [
    path("login/", views.SignIn.as_view(), name="login"),
    path("logout/", auth_views.LogoutView.as_view(), name="logout"),
    path("link/<str:uid>/<str:token>/", views.link_signin, name="signin-link"),
]
