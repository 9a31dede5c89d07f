"""The ledger: what was paid, what the incumbent alone would have cost, quality and latency, per agent and month."""

import csv
import io
from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import Client

from feedback.services import decision_record, rating_submit
from rl.models import Policy, UnrecordedCost
from rl.savings import COLUMNS, ledger, ledger_csv
from tests.support.hosted import answer_of, hosted
from tests.support.registry_rows import policy_of

pytestmark = pytest.mark.django_db

AGENT = "shop"
HOSTED, OWN = "shop-gpt", "shop-v2"
NOVEMBER = datetime(2026, 11, 3, 12, tzinfo=UTC)
OCTOBER = datetime(2026, 10, 3, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def policies() -> None:
    hosted("http://127.0.0.1:1/v1", HOSTED, agent=AGENT, stage="challenger")
    policy_of(OWN, Policy.Stage.CHAMPION, AGENT)


def answered(n: int, policy: str, cost: float | None, at: datetime = NOVEMBER, **facts: Any) -> Any:
    facts = {"latency_ms": 100.0 if policy == OWN else 900.0, "created_at": at, "policy": policy, **facts}
    return answer_of(cost, agent=AGENT, messages=f"question {n}", response=f"answer {n}", **facts)


def test_money_is_the_providers_count_and_the_incumbents_mean_prices_the_rest() -> None:
    for n in range(4):
        answered(n, HOSTED, 0.01 + 0.01 * n)
    for n in range(4, 20):
        answered(n, OWN, 0.0)
    (row,) = ledger()
    assert (row.answers, row.local, row.local_share, row.unpriced) == (20, 16, 0.8, 0)
    assert row.paid == pytest.approx(0.10)
    assert row.alone == pytest.approx(20 * 0.025)
    assert row.saved == pytest.approx(0.40)
    assert (row.latency_ms, row.incumbent_latency_ms) == (100.0, 900.0)
    assert row.words == "80 % of 20 answers came from your own machine; 0.40 USD of 0.50 saved."


def test_answers_to_graders_and_evaluations_were_paid_too() -> None:
    answered(0, HOSTED, 0.02)
    UnrecordedCost.objects.create(agent=AGENT, month=NOVEMBER.replace(day=1, hour=0), cost_usd=0.5)
    (row,) = ledger()
    assert (row.answers, row.paid, row.alone) == (1, pytest.approx(0.52), pytest.approx(0.02))


def test_a_month_without_an_answer_of_the_incumbent_takes_its_last_price() -> None:
    answered(0, HOSTED, 0.02, OCTOBER)
    for n in range(1, 11):
        answered(n, OWN, 0.0)
    november, october = ledger()
    expected = (10, pytest.approx(0.02), pytest.approx(0.2))
    assert (october.month.month, october.alone, november.alone) == expected


def test_unknown_prices_are_counted_and_in_no_sum() -> None:
    answered(0, HOSTED, None)
    answered(1, OWN, 0.0)
    (row,) = ledger()
    assert (row.paid, row.unpriced, row.alone, row.saved) == (0.0, 1, None, None)


def test_answers_of_unknown_price_save_nothing() -> None:
    answered(0, HOSTED, 0.02)
    answered(1, HOSTED, None)
    answered(2, HOSTED, None, source="shadow")
    answered(3, "base", 0.0)
    (row,) = ledger()
    assert (row.answers, row.local, row.unpriced) == (3, 1, 2)
    assert (row.alone, row.saved) == (pytest.approx(0.04), pytest.approx(0.02))


def test_what_an_app_only_recorded_is_not_from_here() -> None:
    answered(0, HOSTED, 0.02)
    answered(1, OWN, 0.0)
    for n in range(2, 20):
        policy = "" if n % 2 else "gpt-of-the-app"
        rating_submit(decision=answered(n, policy, None, source="api"), rater="ada", thumb="up")
    for n in range(20, 30):
        rating_submit(decision=answered(n, HOSTED, 0.02), rater="ada", thumb="up")
    (row,) = ledger()
    assert (row.answers, row.local, row.alone) == (12, 1, pytest.approx(0.24))
    assert row.quality is None


def test_shadow_answers_are_paid_for_and_no_user_got_them() -> None:
    answered(0, OWN, 0.0)
    answered(1, HOSTED, 0.02, source="shadow")
    answered(2, HOSTED, 0.02, source="simulation")
    (row,) = ledger()
    assert (row.answers, row.local, row.paid) == (1, 1, pytest.approx(0.02))
    assert row.alone == pytest.approx(0.02)


def test_quality_is_the_difference_of_what_people_said() -> None:
    for n in range(60):
        policy = OWN if n % 2 else HOSTED
        row = answered(n, policy, 0.0 if policy == OWN else 0.01)
        liked = n % 10 not in ((1, 3) if policy == OWN else (0,))
        rating_submit(decision=row, rater="ada", thumb="up" if liked else "down")
    (row,) = ledger()
    assert row.quality.value == pytest.approx(0.6 - 0.8)
    assert row.quality.low < row.quality.value < row.quality.high < 0.1
    assert "quality -20.0 points [" in row.words


def test_few_ratings_are_no_difference_and_agents_without_a_provider_no_row() -> None:
    answered(0, HOSTED, 0.01)
    rating_submit(decision=answered(1, OWN, 0.0), rater="ada", thumb="up")
    decision_record(agent="other", messages="hello", response="hi", policy="")
    assert [(row.agent, row.quality) for row in ledger()] == [(AGENT, None)]


def test_csv_has_every_figure_and_empty_ones_for_unknown() -> None:
    answered(0, HOSTED, 0.0123456)
    answered(1, OWN, 0.0)
    (line,) = csv.DictReader(io.StringIO(ledger_csv(ledger())))
    assert list(line) == list(COLUMNS)
    expected = (AGENT, "2026-11", "0.012346", "")
    assert (line["agent"], line["month"], line["paid_usd"], line["quality"]) == expected


def test_the_page_and_its_csv(admin_client: Client) -> None:
    answered(0, HOSTED, 0.25)
    answered(1, OWN, 0.0)
    page = admin_client.get(f"/savings/?agent={AGENT}").content.decode()
    assert "50 % of 2 answers came from your own machine" in page
    assert b"Nothing was paid yet" in admin_client.get("/savings/?agent=nobody").content
    found = admin_client.get("/savings/?format=csv")
    assert found["Content-Type"].startswith("text/csv")
    assert found.content.decode().splitlines()[0].split(",") == list(COLUMNS)
