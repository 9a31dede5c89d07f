"""Any order of recording, rating, withdrawing, exporting, importing, undoing and forgetting over REST.

A model in Python says what each answer and what the tables must be: counts agree, no 5xx, a retry stores nothing twice,
and what was forgotten comes back by no retry, replay or file.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from rest_framework.settings import api_settings

from feedback.accounts.authentication import key_create
from feedback.recording.ingest import decision_ingest
from feedback.recording.recorder import Recorder, Storage
from feedback.storage.validation import FeedbackConflict
from tests.support.campaign_scale import CAMPAIGN, scaled
from tests.support.serving import Parrot, parrot_only, support_bot_allowed  # noqa: F401
from tests.support.stateful_requests import Requests

pytestmark = pytest.mark.django_db

EXAMPLES, STEPS = scaled("STATEFUL", 3), scaled("STATEFUL_STEPS", 20)
"""Orders of requests, and the longest of them."""


@pytest.fixture
def machine(
    monkeypatch: pytest.MonkeyPatch, ratchet_home: Path, parrot: Parrot, support_bot: None
) -> type[Requests]:
    """Requests of a key that may do everything, as often as it likes."""

    def record(self: Recorder, facts: Any, *, hold: bool = True) -> Storage:
        """In the asking thread, inside the test's transaction; as a recorder's own thread it takes a conflict for a
        retry that was answered anew."""
        with suppress(FeedbackConflict):
            decision_ingest(**facts, reserved=True)
        return Storage.DATABASE

    for name in ("record", "note"):
        monkeypatch.setattr(Recorder, name, record)
    rates = dict.fromkeys(api_settings.DEFAULT_THROTTLE_RATES, "1000000/s")
    monkeypatch.setattr(api_settings, "DEFAULT_THROTTLE_RATES", rates)
    key = key_create("everything", ["ingest", "rate", "rate_as", "read", "operate"])[1]
    return type("Order", (Requests,), {"key": key, "home": ratchet_home, "tried": Counter()})


@pytest.mark.slow
def test_what_was_forgotten_undone_and_withdrawn_stays_so(machine: type[Requests]) -> None:
    """One order that meets every rule."""
    order = machine()
    done = order.tables_are_as_the_model_says
    for n in range(4):
        order.record(agent="helper", unit=("u1", "u2")[n % 2], n=n // 2, twice=bool(n % 2))
    order.record_several_with_a_repeated_one(agent="filer", unit="u1", n=0)
    order.trace(agent="helper", one="u1", other="u2", n=0)
    order.trace(agent="helper", one="u1", other="u1", n=0)
    order.score(agent="helper", n=3)
    for unit in ("", "u1"):
        order.chat(unit=unit, n=0)
    for pick in range(12):
        order.rate(pick=pick, rater=("ann", "bob")[pick % 2], verdict={"thumb": "up"}, twice=pick % 3 == 0)
        order.compare(pick=pick, rater="ann")
        order.measure(pick=pick, value=0.5)
    done()
    order.record_another_under_its_id(pick=1)
    order.export()
    order.forget(unit="u1", dry_run=True)
    done()
    order.forget(unit="u1", dry_run=False)
    done()
    for pick in range(len(order.writes)):
        order.send_again(pick=pick)
        done()
    order.bring(pick=0, dry_run=False)  # the export from before: nothing of it is new, and nothing returns
    done()
    order.file_from_elsewhere(agent="helper", unit="u2", n=0, rater="bob")
    order.bring(pick=1, dry_run=False)
    order.rate(pick=1, rater="ann", verdict={"stars": 4}, twice=False)
    done()
    order.bring(pick=1, dry_run=False)
    for by in ("batch", "unit", "ids"):
        order.withdraw(pick=len(order.model.decisions) - 1, by=by, dry_run=False)
        done()
    order.export()
    order.reward()
    for _ in range(2):
        order.restore(pick=0)
        order.undo(pick=0)
        done()
    order.bring(pick=1, dry_run=False)
    order.forget(unit="u2", dry_run=False)
    # decided before it was forgotten, whenever the file comes
    order.file_from_elsewhere(agent="helper", unit="u2", n=0, rater="bob")
    for pick in range(len(order.files)):
        order.bring(pick=pick, dry_run=False)
        done()
    for pick in range(9):
        order.read(pick=pick)
    assert order.model.batches
    assert order.model.withdrawals
    assert len(order.model.forgotten) == 2
    order.teardown()


@pytest.mark.slow
def test_any_order_is_taken(machine: type[Requests], record_property: Callable[[str, object], None]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=not CAMPAIGN,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )
    record_property("tried", machine.tried.total())
    assert {"POST 201", "POST 200", "POST 409", "GET 200"} <= set(machine.tried), machine.tried
