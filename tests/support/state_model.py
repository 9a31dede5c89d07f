"""What an installation must hold after any order of requests: the model that `test_api_stateful` compares it with."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

COUNTED = {"Rating": "ratings", "Comparison": "comparisons", "Outcome": "outcomes"}
"""Table -> what an import's report calls its rows."""


@dataclass
class Facts:
    """What is known of a decision."""

    body: dict[str, Any]
    trace: str = ""
    withdrawal: int | None = None
    batch: int | None = None

    @property
    def agent(self) -> str:
        return str(self.body["agent"])

    @property
    def unit(self) -> str:
        return str(self.body.get("unit", ""))


@dataclass
class Word:
    """A rating, a comparison or an outcome."""

    table: str
    decisions: tuple[str, ...]
    rater: str = ""
    batch: int | None = None


@dataclass
class Model:
    """Everything that is stored, by id."""

    decisions: dict[str, Facts] = field(default_factory=dict)
    words: dict[str, Word] = field(default_factory=dict)
    subjects: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Id of a word -> decisions it was said of, whether it is still there or not."""
    traces: dict[str, list[str]] = field(default_factory=dict)
    erased: set[str] = field(default_factory=set)
    """Ids of decisions and traces that were forgotten."""
    forgotten: list[tuple[str, int]] = field(default_factory=list)
    """Units and the generation of their text that is forgotten."""
    generations: Counter[str] = field(default_factory=Counter)
    withdrawals: dict[int, bool] = field(default_factory=dict)
    """Number -> whether it was restored."""
    batches: dict[int, bool] = field(default_factory=dict)
    """Number of an import -> whether it was undone."""

    def one(self, pick: int) -> str:
        return sorted(self.decisions)[pick % len(self.decisions)]

    def pair(self, pick: int) -> tuple[str, str] | None:
        """Two decisions of one agent on one prompt."""
        alike: dict[tuple[str, str], list[str]] = defaultdict(list)
        for pk in sorted(self.decisions):
            facts = self.decisions[pk]
            if facts.body["messages"] and "state" in facts.body:
                alike[facts.agent, str(facts.body["messages"])].append(pk)
        pairs = [(a, b) for pks in alike.values() for a in pks for b in pks if a != b]
        return pairs[pick % len(pairs)] if pairs else None

    # --- Words -------------------------------------------------------------------------------------------------

    def say(self, pk: str, word: Word) -> None:
        self.words[pk] = word
        self.subjects[pk] = word.decisions

    def rate(self, pk: str, decision: str, rater: str, batch: int | None = None) -> None:
        self.say(pk, Word("Rating", (decision,), rater, batch))

    def compare(self, pk: str, left: str, right: str, batch: int | None = None) -> None:
        self.say(pk, Word("Comparison", (left, right), batch=batch))

    def measure(self, pk: str, decision: str, batch: int | None = None) -> None:
        self.say(pk, Word("Outcome", (decision,), batch=batch))

    def ids(self, table: str) -> list[str]:
        return [pk for pk, word in self.words.items() if word.table == table]

    def counts(self) -> Counter[str]:
        """Decision -> people whose word on it stands."""
        said = {(word.decisions[0], word.rater) for word in self.words.values() if word.table == "Rating"}
        return Counter(decision for decision, _ in said)

    def _spoken_of(self) -> set[str]:
        return {decision for word in self.words.values() for decision in word.decisions}

    # --- Forgetting --------------------------------------------------------------------------------------------

    def of_unit(self, unit: str) -> set[str]:
        return {pk for pk, facts in self.decisions.items() if facts.unit == unit}

    def touched(self, trace: str) -> bool:
        """Whether a decision of a trace is gone."""
        return not set(self.traces[trace]) <= set(self.decisions)

    def forget(self, unit: str, decisions: Iterable[str]) -> None:
        gone = set(decisions)
        traces = {self.decisions[pk].trace for pk in gone} - {""}
        self.erased |= gone
        self._remove(gone)
        for trace in traces:
            if not any(facts.trace == trace for facts in self.decisions.values()):
                self.erased.add(trace)
        self.forgotten.append((unit, self.generations[unit]))
        self.generations[unit] += 1

    def _remove(self, gone: set[str]) -> None:
        self.words = {pk: word for pk, word in self.words.items() if not gone & set(word.decisions)}
        for pk in gone:
            del self.decisions[pk]

    # --- Files -------------------------------------------------------------------------------------------------

    def exported(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The rows of an export, which must be all that is not withdrawn, each once."""
        live = {pk for pk, facts in self.decisions.items() if facts.withdrawal is None}
        file = self.read(rows)
        assert sorted(row["id"] for row in rows if row["type"] == "decision") == sorted(live)
        wanted = {pk: word.decisions for pk, word in self.words.items() if set(word.decisions) <= live}
        assert {pk: word.decisions for pk, word in file["words"].items()} == wanted
        return file

    def read(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Decisions and words in the rows of a file."""
        decisions, words = {}, {}
        for row in rows:
            if row["type"] == "decision":
                known = self.decisions.get(row["id"])
                body = (
                    known.body
                    if known
                    else {name: row[name] for name in ("id", "agent", "messages", "unit", "state")}
                )
                decisions[row["id"]] = Facts(body, trace=known.trace if known else "")
                for name, table in (("ratings", "Rating"), ("outcomes", "Outcome")):
                    for said in row[name]:
                        words[said["id"]] = Word(table, (row["id"],), said.get("rater", ""))
            elif row["type"] == "comparison":
                words[row["id"]] = Word("Comparison", (row["left"], row["right"]), row["rater"])
        return {"decisions": decisions, "words": words, "generations": dict(self.generations)}

    def new_of(self, file: dict[str, Any]) -> dict[str, set[str]]:
        """What an import of the file must bring: what is not here, and was not forgotten."""
        fresh = {
            pk
            for pk, facts in file["decisions"].items()
            if pk not in self.decisions and pk not in self.erased and not self._unit_gone(file, facts)
        }
        new = {"decisions": fresh} | {name: set() for name in COUNTED.values()}
        here = set(self.decisions) | fresh
        for pk, word in file["words"].items():
            if pk not in self.words and set(word.decisions) <= here:
                new[COUNTED[word.table]].add(pk)
        return new

    def _unit_gone(self, file: dict[str, Any], facts: Facts) -> bool:
        """Whether the unit was forgotten since the decision was taken."""
        return file["generations"].get(facts.unit, 0) < self.generations[facts.unit]

    def bring(self, file: dict[str, Any], new: dict[str, set[str]], batch: int) -> None:
        self.batches[batch] = False
        for pk in new["decisions"]:
            facts = file["decisions"][pk]
            self.decisions[pk] = Facts(facts.body, facts.trace, batch=batch)
        for name in COUNTED.values():
            for pk in new[name]:
                word = file["words"][pk]
                self.say(pk, Word(word.table, word.decisions, word.rater, batch))

    def undo(self, batch: int) -> set[str]:
        """Take an import back. Returns the decisions that go: those of it, and of imports undone before that had been
        kept for its words, of which nothing is said any more."""
        mine = {pk for pk, word in self.words.items() if word.batch == batch}
        touched = {decision for pk in mine for decision in self.words[pk].decisions}
        for pk in mine:
            del self.words[pk]
        self.batches[batch] = True
        spoken = self._spoken_of()
        gone = {
            pk
            for pk, facts in self.decisions.items()
            if pk not in spoken
            and (
                facts.batch == batch
                or (pk in touched and facts.batch is not None and self.batches[facts.batch])
            )
        }
        self._remove(gone)
        return gone


def line_of(body: dict[str, Any], rating: str, rater: str) -> dict[str, Any]:
    """A decision with a rating, as a line of our own format that another installation exported."""
    messages = [{"role": "user", "content": body["messages"]}]
    said = {"id": rating, "rater": rater, "rater_kind": "human", "thumb": "up"}
    said |= {"created_at": "2026-01-02T00:00:00Z"}
    return {
        "type": "decision",
        **body,
        "messages": messages,
        "created_at": "2026-01-01T00:00:00Z",
        "ratings": [said],
        "outcomes": [],
    }
