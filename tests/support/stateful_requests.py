"""Requests in any order: each says what its answer must be, by the model of `tests.support.state_model`."""

import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from django.apps import apps
from django.db import transaction
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from feedback.cache import forget_all
from feedback.erasure.service import UnitUnknown, unit_forget
from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from rl.datasets.reward_records import rewards_calculate
from rl.models import RewardRecord
from tests.support.api_client import ApiClient
from tests.support.state_model import Facts, Model, line_of

AGENTS, UNITS, RATERS = ("helper", "filer"), ("", "u1", "u2"), ("ann", "bob")
PAGES = (
    "/api/decisions/ /api/imports/ /api/withdrawals/ /api/agreement/?agent=helper /api/online/helper/ "
    "/api/policies/helper /api/decisions/?q=secret /api/decisions/?rated=true"
).split()

agents, units, raters = st.sampled_from(AGENTS), st.sampled_from(UNITS), st.sampled_from(RATERS)
picks = st.integers(0, 10_000)
verdicts = st.sampled_from(
    [
        {"thumb": "up"},
        {"thumb": "down"},
        {"stars": 4},
        {"score": 0.25},
        {"correction": "better"},
        {"notes": "hm"},
    ]
)


class Requests(RuleBasedStateMachine):
    """One order of requests, in a transaction of its own."""

    key = ""
    home = Path()
    tried: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        forget_all()
        self.atomic = transaction.atomic()
        self.atomic.__enter__()
        self.api = ApiClient(key=self.key)
        self.model = Model()
        self.number = 0
        self.files: list[dict[str, Any]] = []
        """Texts of exports and of files from elsewhere, each with the rows in it."""
        self.writes: list[tuple[str, dict[str, Any], str]] = []
        """What was sent and stored: address, body, kind."""

    def teardown(self) -> None:
        try:
            for unit, generation in self.model.forgotten:
                self.nowhere(f"secret of {unit}.{generation}.")
        finally:
            transaction.set_rollback(True)
            self.atomic.__exit__(None, None, None)
            forget_all()

    def nowhere(self, text: str) -> None:
        """No table and no file has the text of what was forgotten."""
        for table in apps.get_models():
            for row in table._default_manager.values_list() if table._meta.managed else ():
                assert text not in str(row), f"{table.__name__} still has {text!r}: {row}"
        for file in self.home.rglob("*"):
            assert not file.is_file() or text.encode() not in file.read_bytes(), f"{file} has {text!r}"

    def id(self) -> str:
        self.number += 1
        return str(uuid.UUID(int=self.number))

    def send(self, path: str, body: Any, *allowed: int, **more: Any) -> Any:
        answer = self.api.post(path, body, **more)
        self.tried[f"POST {answer.status_code}"] += 1
        assert answer.status_code in allowed, (path, body, answer.status_code, answer.content[:500])
        return answer

    def get(self, path: str, *allowed: int) -> Any:
        answer = self.api.get(path)
        self.tried[f"GET {answer.status_code}"] += 1
        assert answer.status_code in allowed, (path, answer.status_code, answer.content[:500])
        return answer

    # --- Writes ----------------------------------------------------------------------------------------------------

    def decision(self, agent: str, unit: str, n: int) -> dict[str, Any]:
        generation = self.model.generations[unit]
        text = f"question {n % 2}, secret of {unit}.{generation}." if unit else f"question {n % 2}"
        return {
            "id": self.id(),
            "agent": agent,
            "messages": text,
            "response": f"answer {n % 3}",
            "unit": unit,
            "state": {"text": text},
            "tags": [f"t{n % 2}"],
        }

    @rule(agent=agents, unit=units, n=picks, twice=st.booleans())
    def record(self, agent: str, unit: str, n: int, twice: bool) -> None:
        body = self.decision(agent, unit, n)
        self.send("/api/decisions/", body, 201)
        self.model.decisions[body["id"]] = Facts(body)
        self.writes.append(("/api/decisions/", body, "decision"))
        if twice:
            self.send("/api/decisions/", body, 200)

    @rule(agent=agents, unit=units, n=picks)
    def record_several_with_a_repeated_one(self, agent: str, unit: str, n: int) -> None:
        bodies = [self.decision(agent, unit, n + k) for k in range(3)]
        found = self.send("/api/decisions/", [*bodies, bodies[1]], 201).json()
        assert (found["created"], found["repeated"], found["refused"]) == (3, 1, 0)
        for body in bodies:
            self.model.decisions[body["id"]] = Facts(body)
            self.writes.append(("/api/decisions/", body, "decision"))

    @rule(agent=agents, one=units, other=units, n=picks)
    def trace(self, agent: str, one: str, other: str, n: int) -> None:
        steps = [
            {"kind": "decision", **self.decision(agent, unit, n + k)} for k, unit in enumerate((one, other))
        ]
        for step in steps:
            del step["agent"]
        body = {"id": self.id(), "agent": agent, "steps": [{"kind": "tool_call", "name": "find"}, *steps]}
        self.send("/api/traces/", body, 201)
        self.send("/api/traces/", body, 200)
        self.writes.append(("/api/traces/", body, "trace"))
        self.model.traces[body["id"]] = [step["id"] for step in steps]
        for step in steps:
            self.model.decisions[step["id"]] = Facts({**step, "agent": agent}, trace=body["id"])

    @rule(agent=agents, n=picks)
    def score(self, agent: str, n: int) -> None:
        """A decision and its rating in one request; a retry of it makes neither again."""
        before = set(map(str, Decision.objects.values_list("pk", flat=True)))
        body = {"id": self.id(), "prompt": f"question {n % 2}", "response": f"answer {n % 3}"}
        body |= {"score": n % 5 / 4}
        self.send(f"/api/policies/feedback/{agent}", body, 201)
        self.send(f"/api/policies/feedback/{agent}", body, 200)
        rating = Rating.objects.get(pk=body["id"])
        assert str(rating.decision_id) not in before
        self.model.decisions[str(rating.decision_id)] = Facts({"agent": agent, "unit": "", "messages": ""})
        self.model.rate(body["id"], str(rating.decision_id), rating.rater)

    @rule(unit=units, n=st.integers(0, 3))
    def chat(self, unit: str, n: int) -> None:
        """Two requests under one Idempotency-Key are one decision; with another body the second is refused."""
        key = f"{unit}.{self.model.generations[unit]}.{n}"
        text = f"secret of {unit}.{self.model.generations[unit]}." if unit else "hello"
        body = {"model": "support-bot", "messages": [{"role": "user", "content": text}]} | (
            {"user": unit} if unit else {}
        )
        first = self.send("/v1/chat/completions", body, 200, headers={"Idempotency-Key": key}).json()
        again = self.send("/v1/chat/completions", body, 200, headers={"Idempotency-Key": key}).json()
        assert first["id"] == again["id"]
        other = {**body, "messages": [{"role": "user", "content": "another"}]}
        self.send("/v1/chat/completions", other, 409, headers={"Idempotency-Key": key})
        self.model.decisions.setdefault(
            first["id"], Facts({"agent": "support-bot", "unit": unit, "messages": text})
        )

    @precondition(lambda self: self.writes)
    @rule(pick=picks)
    def send_again(self, pick: int) -> None:
        """A late retry: what is there stays as it is, what was undone is stored, what was erased is not."""
        path, body, kind = self.writes[pick % len(self.writes)]
        if kind == "decision":
            known, erased = body["id"] in self.model.decisions, body["id"] in self.model.erased
            self.send(path, body, 409 if erased else 200 if known else 201)
            if not erased and not known:
                self.model.decisions[body["id"]] = Facts(body)
        elif kind == "trace":
            if body["id"] in self.model.traces and not self.model.touched(body["id"]):
                self.send(path, body, 200)
            elif body["id"] in self.model.erased:
                self.send(path, body, 409)
        else:
            known = body["id"] in self.model.words
            there = set(self.model.subjects[body["id"]]) <= set(self.model.decisions)
            if known or not there:
                self.send(path, body, 200 if known else 404)

    @precondition(lambda self: self.model.decisions)
    @rule(pick=picks)
    def record_another_under_its_id(self, pick: int) -> None:
        self.send(
            "/api/decisions/",
            {"id": self.model.one(pick), "agent": "helper", "messages": "x", "response": "y"},
            409,
        )

    @precondition(lambda self: self.model.decisions)
    @rule(pick=picks, rater=raters, verdict=verdicts, twice=st.booleans())
    def rate(self, pick: int, rater: str, verdict: dict[str, Any], twice: bool) -> None:
        decision, body = self.model.one(pick), {"id": self.id(), "rater": rater, **verdict}
        path = f"/api/decisions/{decision}/ratings/"
        self.send(path, body, 201)
        self.model.rate(body["id"], decision, rater)
        self.writes.append((path, body, "word"))
        if twice:
            self.send(path, body, 200)
            self.send(path, {**body, "notes": "another"}, 409)

    @precondition(lambda self: self.model.decisions)
    @rule(pick=picks, rater=raters)
    def compare(self, pick: int, rater: str) -> None:
        pair = self.model.pair(pick)
        if pair is None:
            return
        body = {"id": self.id(), "left": pair[0], "right": pair[1], "preference": "left", "rater": rater}
        self.send("/api/comparisons/", body, 201)
        self.model.compare(body["id"], *pair)
        self.writes.append(("/api/comparisons/", body, "word"))

    @precondition(lambda self: self.model.decisions)
    @rule(pick=picks, value=st.sampled_from([True, 0.5, -3]))
    def measure(self, pick: int, value: float) -> None:
        decision, body = self.model.one(pick), {"id": self.id(), "name": "clicked", "value": value}
        self.send(f"/api/decisions/{decision}/outcomes/", body, 201)
        self.model.measure(body["id"], decision)
        self.writes.append((f"/api/decisions/{decision}/outcomes/", body, "word"))

    # --- Taking out and putting back -----------------------------------------------------------------------------

    @precondition(lambda self: self.model.decisions)
    @rule(pick=picks, by=st.sampled_from(["ids", "unit", "agent", "batch"]), dry_run=st.booleans())
    def withdraw(self, pick: int, by: str, dry_run: bool) -> None:
        chosen = self.model.decisions[self.model.one(pick)]
        values = {"unit": chosen.unit, "agent": chosen.agent, "batch": chosen.batch}
        values |= {"ids": [self.model.one(pick)]}
        if not values[by]:
            return
        wanted = {
            pk
            for pk, facts in self.model.decisions.items()
            if facts.withdrawal is None
            and (pk in values["ids"] if by == "ids" else getattr(facts, by) == values[by])
        }
        done = self.send(
            "/api/withdrawals/", {by: values[by], "dry_run": dry_run}, 201 if wanted and not dry_run else 200
        ).json()
        assert done["decisions"] == len(wanted)
        if not dry_run:
            for pk in wanted:
                self.model.decisions[pk].withdrawal = done["withdrawal"]
            if wanted:
                self.model.withdrawals[done["withdrawal"]] = False

    @precondition(lambda self: self.model.withdrawals)
    @rule(pick=picks)
    def restore(self, pick: int) -> None:
        number = sorted(self.model.withdrawals)[pick % len(self.model.withdrawals)]
        if self.model.withdrawals[number]:
            self.send(f"/api/withdrawals/{number}/restore/", {}, 409)
            return
        of = [facts for facts in self.model.decisions.values() if facts.withdrawal == number]
        assert self.send(f"/api/withdrawals/{number}/restore/", {}, 200).json()["decisions"] == len(of)
        self.model.withdrawals[number] = True
        for facts in of:
            facts.withdrawal = None

    @rule(unit=st.sampled_from(UNITS[1:]), dry_run=st.booleans())
    def forget(self, unit: str, dry_run: bool) -> None:
        wanted = self.model.of_unit(unit)
        try:
            done = unit_forget(unit, dry_run=dry_run)
        except UnitUnknown:
            assert not wanted
            return
        assert done.decisions == len(wanted)
        if not dry_run:
            self.model.forget(unit, wanted)

    # --- Files -----------------------------------------------------------------------------------------------------

    @rule()
    def export(self) -> None:
        text = b"".join(self.get("/api/ratings/export/", 200).streaming_content).decode()
        file = self.model.exported([json.loads(line) for line in text.splitlines()])
        self.files.append({"text": text, **file})

    @rule(agent=agents, unit=units, n=picks, rater=raters)
    def file_from_elsewhere(self, agent: str, unit: str, n: int, rater: str) -> None:
        rows = [line_of(self.decision(agent, unit, n + k), self.id(), rater) for k in range(2)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        # its rows were decided long ago: before anything was forgotten here
        self.files.append({"text": text, **self.model.read(rows), "generations": {}})

    @precondition(lambda self: self.files)
    @rule(pick=picks, dry_run=st.booleans())
    def bring(self, pick: int, dry_run: bool) -> None:
        file = self.files[pick % len(self.files)]
        new = self.model.new_of(file)
        body = {"name": "x.jsonl", "content": file["text"], "format": "ratchet", "dry_run": dry_run}
        if not file["text"].strip():
            self.send("/api/imports/", body, 400)
            return
        answer = self.send("/api/imports/", body, 200, 201, 400)
        found = answer.json()
        if answer.status_code == 400:
            assert not any(new.values()), found
            return
        assert {name: found[name] for name in new} == {name: len(rows) for name, rows in new.items()}, found
        assert (found["batch"] is not None) == (any(new.values()) and not dry_run)
        if found["batch"] is not None:
            self.model.bring(file, new, found["batch"])

    @precondition(lambda self: self.model.batches)
    @rule(pick=picks)
    def undo(self, pick: int) -> None:
        number = sorted(self.model.batches)[pick % len(self.model.batches)]
        if self.model.batches[number]:
            self.send(f"/api/imports/{number}/undo/", {}, 409)
            return
        gone = self.model.undo(number)
        assert self.send(f"/api/imports/{number}/undo/", {}, 200).json()["decisions"] == len(gone)

    # --- Reading ---------------------------------------------------------------------------------------------------

    @rule(pick=picks)
    def read(self, pick: int) -> None:
        self.get(PAGES[pick % len(PAGES)], 200)
        if self.model.decisions:
            self.get(f"/api/decisions/{self.model.one(pick)}/", 200)
        for pk in sorted(self.model.erased)[:1]:
            self.get(f"/api/decisions/{pk}/", 404)

    @rule()
    def reward(self) -> None:
        assert rewards_calculate().refused == {}
        rewarded = set(map(str, RewardRecord.objects.values_list("decision", flat=True)))
        assert rewarded <= {pk for pk, facts in self.model.decisions.items() if facts.withdrawal is None}

    @invariant()
    def tables_are_as_the_model_says(self) -> None:
        stored = {
            str(pk): (agent, unit, withdrawal, count)
            for pk, agent, unit, withdrawal, count in Decision.objects.values_list(
                "pk", "agent", "unit", "withdrawal", "ratings_human"
            )
        }
        counts = self.model.counts()
        expected = {
            pk: (facts.agent, facts.unit, facts.withdrawal, counts[pk])
            for pk, facts in self.model.decisions.items()
        }
        assert stored == expected
        for table in (Rating, Comparison, Outcome):
            ids = sorted(map(str, table._default_manager.values_list("pk", flat=True)))
            assert ids == sorted(self.model.ids(table.__name__)), table.__name__
        assert not set(map(str, Trace.objects.values_list("pk", flat=True))) & self.model.erased
