"""Addresses of this application."""

from __future__ import annotations

from django.contrib.auth.views import LogoutView
from django.urls import path

from feedback import agents as agent_views
from feedback.accounts import sign_in as account_views
from feedback.agreement import views as agreement_views
from feedback.explorer import views as explorer_views
from feedback.rating import feedback_form, pair_views, views
from feedback.transfer import views as transfer_views

urlpatterns = [
    path("accounts/login/", account_views.SignIn.as_view(), name="login"),
    path("admin/login/", account_views.admin_login, name="admin-login"),
    path("accounts/logout/", LogoutView.as_view(), name="logout"),
    path("accounts/link/<str:uid>/<str:token>/", account_views.link_signin, name="signin-link"),
    path("feedback/<str:token>", feedback_form.feedback, name="feedback-form"),
    path("people/", account_views.people, name="people"),
    path("rate/", views.rate, name="rate"),
    path("rate/undo/", views.rate_undo, name="rate-undo"),
    path("rate/skip/", views.rate_skip, name="rate-skip"),
    path("rate/pairs/", pair_views.pairs, name="pairs"),
    path("rate/pairs/undo/", pair_views.pairs_undo, name="pairs-undo"),
    path("rate/pairs/skip/", pair_views.pairs_skip, name="pairs-skip"),
    path("decisions/", explorer_views.decisions, name="decisions"),
    path("decisions/<uuid:pk>/", explorer_views.decision, name="decision"),
    path("decisions/withdraw/", explorer_views.decisions_take_out, name="decisions-withdraw"),
    path("decisions/<uuid:pk>/withdraw/", explorer_views.decision_take_out, name="decision-withdraw"),
    path("decisions/<uuid:pk>/restore/", explorer_views.decision_put_back, name="decision-restore"),
    path("problems/", explorer_views.problem_rows, name="problems"),
    path("import/", transfer_views.imports, name="import"),
    path("import/do/", transfer_views.import_do, name="import-do"),
    path("imports/", transfer_views.import_list, name="imports"),
    path("imports/<int:number>/", transfer_views.import_detail, name="import-one"),
    path("imports/<int:number>/undo/", transfer_views.import_take_back, name="import-undo"),
    path("export/", transfer_views.exports, name="export"),
    path("export/file/", transfer_views.export_file, name="export-file"),
    path("agents/<str:slug>/change/", agent_views.agent_change, name="agent-change"),
    path("agreement/", agreement_views.agreement, name="agreement"),
]
