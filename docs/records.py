"""Number the records of DECISIONS.md and write its index: python docs/records.py (--check: only say what is wrong)."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "DECISIONS.md"
HEADING = re.compile(r"## (?:(?P<number>\d+) · )?(?P<date>\d{4}-\d\d-\d\d) · (?P<title>.+)")
STATUS = re.compile(
    r"Status: (?P<status>accepted|(?:accepted, amended|superseded) by (?P<newer>[\d, ]*\d))\."
)
INDEX = ("| record | date | decision | status |", "| --: | --- | --- | --- |")


@dataclass(frozen=True)
class Record:
    """One decision: its number (None until the script gives one), date, title, status and text."""

    number: int | None
    date: str
    title: str
    status: str
    text: str

    @property
    def newer(self) -> list[int]:
        """Numbers of the records that amend or supersede this one."""
        return [int(number) for number in re.findall(r"\d+", self.status)]

    @property
    def anchor(self) -> str:
        """The heading's address on the page, as GitHub makes it: lower case, blanks to dashes, no punctuation."""
        heading = f"{self.number} · {self.date} · {self.title}".lower()
        return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def read(text: str) -> tuple[str, list[Record]]:
    """The head of the file without its index, and the records as they stand, newest first."""
    head, *parts = re.split(r"(?m)^(?=## )", text)
    records = []
    for part in parts:
        line, _, rest = part.partition("\n")
        heading = HEADING.fullmatch(line.rstrip())
        if heading is None:
            raise ValueError(f"expected a heading such as `## 2026-11-23 · Title`, found `{line}`")
        first, _, after = rest.strip("\n").partition("\n")
        status = "accepted"
        if first.startswith("Status:"):
            matched = STATUS.fullmatch(first.rstrip())
            if matched is None:
                raise ValueError(
                    f"{heading['title']}: expected `Status: accepted.` or `... by 12.`, found `{first}`"
                )
            status, rest = matched["status"], after
        number = int(heading["number"]) if heading["number"] else None
        records.append(Record(number, heading["date"], heading["title"], status, rest.strip("\n")))
    lines = [line for line in head.splitlines() if not line.startswith("|")]
    return "\n".join(lines).strip("\n"), records


def numbered(records: list[Record]) -> list[Record]:
    """The records, those without a number numbered on from the highest, the lowest on the page first."""
    last = max((record.number or 0 for record in records), default=0)
    done = []
    for record in reversed(records):
        if record.number is None:
            last += 1
            record = replace(record, number=last)
        done.append(record)
    return done[::-1]


def faults(records: list[Record]) -> list[str]:
    """What is wrong with the records: numbers that do not fall down the page, a status that names no later record.

    Records without a number are right only above all others: new ones, which the script numbers.
    """
    problems = []
    numbers = [record.number for record in records if record.number is not None]
    if None in [record.number for record in records[len(records) - len(numbers) :]]:
        problems.append(
            "a record without a number stands below one that has its number; new records go on top"
        )
    if numbers != sorted(set(numbers), reverse=True):
        problems.append("numbers do not fall from the top of the page to its end, each used once")
    dates = {record.number: record.date for record in records}
    for record in records:
        if not record.text:
            problems.append(f"{record.title}: a heading without a text")
        for newer in record.newer:
            if newer == record.number or dates.get(newer, "") < record.date:
                problems.append(f"{record.title}: its status names record {newer}, which is no later one")
    titles = [record.title for record in records]
    problems += [f"{title}: stands twice" for title in sorted({t for t in titles if titles.count(t) > 1})]
    return problems


def index(records: list[Record]) -> str:
    """A table of all records that have a number, newest first."""
    rows = [
        f"| {record.number} | {record.date} | [{record.title}](#{record.anchor}) | {record.status} |"
        for record in records
        if record.number is not None
    ]
    return "\n".join([*INDEX, *rows])


def written(head: str, records: list[Record]) -> str:
    """The whole file."""
    parts = [head, index(records)]
    for record in records:
        number = f"{record.number} · " if record.number is not None else ""
        parts.append(
            f"## {number}{record.date} · {record.title}\n\nStatus: {record.status}.\n\n{record.text}"
        )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    head, records = read(FILE.read_text("utf-8"))
    check = sys.argv[1:] == ["--check"]
    records = records if check else numbered(records)
    if wrong := faults(records):
        sys.exit("DECISIONS.md: " + "; ".join(wrong))
    if not check:
        FILE.write_text(written(head, records), "utf-8")
        print(f"{len(records)} records; the newest is {records[0].number}. {records[0].title}")  # noqa: T201


if __name__ == "__main__":
    main()
