"""Addresses of the help desk."""

from django.urls import path

from helpdesk import views

urlpatterns = [
    path("", views.tickets, name="tickets"),
    path("tickets/<int:pk>/thumb/", views.thumb, name="thumb"),
]
