"""Feedback becomes an immutable dataset: preference pairs, written once, hashed, counted, never changed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.db import transaction

from feedback import selectors
from feedback.formats.records import FormatRefused
from rl.dataset_stats import example_stats, feedback_stats, pair_stats
from rl.evidence import DatabaseEvidence, EvidenceSource, FileEvidence, Prompt
from rl.examples import (
    REWARDED,
    Example,
    ExampleSet,
    Rewarded,
    examples_balanced,
    examples_from_evidence,
    examples_sampled,
    prompt_examples,
)
from rl.models import Snapshot
from rl.pairs import SOURCES, SPLITS, Completion, Evidence, Pair, PairSet, pairs_from_evidence, sampled
from rl.recipes import DATASET_CONFIG, RecipeError
from rl.replay import Replay

logger = logging.getLogger("rl.datasets")

PROMPTS_AT_ONCE = 1000
"""Prompts held in memory while rows are written."""


class DatasetRefused(ValueError):
    """Feedback that cannot become the dataset asked for; the message says what was found and what to do next."""


@dataclass(frozen=True)
class Prepared:
    """A dataset that is ready to train on; with dry_run nothing was written, and `snapshot` and `path` are None."""

    agent: str
    kind: str
    counts: dict[str, int]
    """Rows per split; all three are there."""
    left_out: dict[str, int]
    """What made no row: {reason: count}; reasons as in rl.pairs.REASONS and rl.evidence.REASONS."""
    sources: dict[str, int]
    """Rows per kind of evidence."""
    feedback_count: int
    """Ratings and comparisons it was made from."""
    simulated_share: float
    """Share of them given by a simulated rater, 0 to 1."""
    query: dict[str, Any]
    """What was asked: source, knobs, newest feedback seen."""
    snapshot: Snapshot | None
    path: Path | None
    _rows: Callable[[], Iterator[dict[str, Any]]] = field(repr=False)

    @property
    def samples(self) -> int:
        """Rows in all splits together."""
        return sum(self.counts.values())

    def rows(self, split: str | None = None) -> Iterator[dict[str, Any]]:
        """The rows, of one split or of all; may be asked for more than once."""
        return (row for row in self._rows() if split is None or row["split"] == split)


@dataclass
class _Tally:
    """Counts rows as they pass."""

    counts: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)

    @property
    def counts_ordered(self) -> dict[str, int]:
        return {split: self.counts[split] for split in SPLITS}

    @property
    def sources_ordered(self) -> dict[str, int]:
        return {name: self.sources[name] for name in SOURCES if self.sources[name]}

    def over(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for row in rows:
            self.counts[row["split"]] += 1
            self.sources[row["source"]] += 1
            yield row


def prepare_training_dataset(
    agent: str,
    kind: str = "pairs",
    *,
    source: str = "db",
    data_file: str | Path | None = None,
    ratings_file: str | Path | None = None,
    file_format: str = "auto",
    min_samples: int | None = None,
    max_samples: int | None = None,
    rating_margin: float | None = None,
    max_pairs_per_prompt: int | None = None,
    replay: Replay | None = None,
    balance: bool = False,
    for_training: bool = True,
    dry_run: bool = False,
) -> Prepared:
    """The agent's feedback as rows of a kind (Snapshot.Kind), written as a snapshot (or only counted, with dry_run).

    pairs are made by rl.pairs, the other kinds by rl.examples: labels (KTO), scores (reward regression), corrections
    (SFT), groups (several rated responses to a prompt) and prompts alone.

    source "db" reads what was rated here; "file" reads `data_file`, in any format of feedback.formats (recognised
    where `file_format` is "auto"), with its `ratings_file` where the format has two. Knobs left None are those of
    DATASET_CONFIG. max_samples draws that many pairs, always the same. The same feedback and knobs give the same
    file, byte for byte; a snapshot of that content is used again.

    balance: of labels, leave out training rows of the kind there is more of, until four stand beside three.

    replay: train on the prompts with new feedback and a share of the others; without it, on all.

    for_training: refuse where no pair stands in the train split; an evaluation may be held out as a whole.

    Raises DatasetRefused: unknown agent, kind or source, fewer pairs than min_samples, a file that cannot be read, a
    folder that cannot be written to (nothing half-written stays behind).
    """
    if kind not in Snapshot.Kind.values:
        raise DatasetRefused(f"a dataset's kind is one of {', '.join(Snapshot.Kind.values)}; found {kind!r}")
    if not re.fullmatch(selectors.SLUG_PATTERN, agent):
        raise DatasetRefused(
            f"an agent is a slug of 1 to 64 lower-case letters, digits, - and _; found {agent!r}"
        )
    need = DATASET_CONFIG["min_samples"] if min_samples is None else min_samples
    knobs: dict[str, Any] = {
        "rating_margin": DATASET_CONFIG["rating_margin"] if rating_margin is None else rating_margin,
        "max_pairs_per_prompt": (
            DATASET_CONFIG["max_pairs_per_prompt"] if max_pairs_per_prompt is None else max_pairs_per_prompt
        ),
    }
    left_out: Counter[str] = Counter()
    try:
        given = _source(agent, source, data_file, ratings_file, file_format)
        pairs = _made(given, kind, left_out, knobs)
        replayed = {}
        if replay is not None:
            salt = str(given.feedback_count)
            pairs = replay.draw(pairs, salt)
            replayed = {"replay": replay.query(salt, pairs.rows)}
        if balance:
            if kind != Snapshot.Kind.LABELS or not isinstance(pairs, ExampleSet):
                raise RecipeError(f"only labels can be balanced, found {kind}")
            pairs = examples_balanced(pairs)
        pairs = _sampled(pairs, max_samples)
    except (RecipeError, FormatRefused) as error:
        raise DatasetRefused(str(error)) from error
    left_out.update(pairs.left_out)
    query = {
        "agent": agent,
        "source": source,
        **(knobs if kind == "pairs" else {}),
        "max_samples": max_samples,
        **({"balance": True} if balance else {}),
    }
    query |= given.query() | replayed
    share = given.simulated_count / given.feedback_count if given.feedback_count else 0.0

    tally = _Tally()
    rows = tally.over(_rows(agent, given, pairs, left_out))
    if dry_run:
        for _ in rows:
            pass
        _check_enough(agent, kind, tally, need, source, left_out, for_training)
        snapshot, path = None, None
    else:
        with _temporary_file(settings.RATCHET_HOME / "snapshots" / agent) as file:
            sha256 = _write(file, rows)
            _check_enough(agent, kind, tally, need, source, left_out, for_training)
            path = _keep(file, sha256)
        snapshot = _snapshot_of(
            agent=agent,
            kind=kind,
            path=str(path.relative_to(settings.RATCHET_HOME)),
            sha256=sha256,
            counts=tally.counts_ordered,
            sources=tally.sources_ordered,
            left_out=dict(left_out),
            query=query,
            feedback_count=given.feedback_count,
            simulated_share=share,
        )
    return Prepared(
        agent=agent,
        kind=kind,
        counts=tally.counts_ordered,
        left_out=dict(left_out),
        sources=tally.sources_ordered,
        feedback_count=given.feedback_count,
        simulated_share=share,
        query=query,
        snapshot=snapshot,
        path=path,
        _rows=lambda: snapshot_rows(snapshot) if snapshot else _rows(agent, given, pairs, Counter()),
    )


def get_training_stats(agent: str | None = None) -> dict[str, Any]:
    """What an agent's feedback holds and what pairs it would give; without an agent, {"agents": {slug: ...}} of all.

    Keys: decisions, ratings, comparisons, corrections, simulated_share, balance (verdicts above and below neutral),
    scores (mean, std, histogram over [0, 1]), raters, duplicate_responses, pairs per split, sources, prompts,
    length_chars, chosen_longer, left_out, and `kinds`: what each other kind of dataset would hold (rows per split,
    sources, prompts, length_chars, duplicates; labels' balance, scores' spread, groups' sizes, what was left out).
    Raises DatasetRefused for an agent nobody has heard of.
    """
    if agent is None:
        return {"agents": {slug: get_training_stats(slug) for slug in selectors.agents_known()}}
    given = _source(agent, "db")
    left_out: Counter[str] = Counter()
    knobs = {name: DATASET_CONFIG[name] for name in ("rating_margin", "max_pairs_per_prompt")}
    pairs = pairs_from_evidence(given.evidence(left_out), **knobs)
    left_out.update(pairs.left_out)
    found = {"agent": agent, **feedback_stats(agent), **pair_stats(_rows(agent, given, pairs, left_out))}
    return {
        **found,
        "left_out": dict(left_out),
        "kinds": {kind: kind_stats(agent, kind) for kind in OTHER_KINDS},
    }


OTHER_KINDS = tuple(str(kind) for kind in Snapshot.Kind.values if kind != Snapshot.Kind.PAIRS)


def kind_stats(agent: str, kind: str) -> dict[str, Any]:
    """What a dataset of a kind other than pairs would hold, see `get_training_stats`."""
    given = _source(agent, "db")
    left_out: Counter[str] = Counter()
    made = _made(given, kind, left_out, {})
    left_out.update(made.left_out)
    stats = example_stats(_rows(agent, given, made, left_out))
    return {**stats, "left_out": dict(left_out)}


def _source(
    agent: str,
    source: str,
    data_file: str | Path | None = None,
    ratings_file: str | Path | None = None,
    file_format: str = "auto",
) -> EvidenceSource:
    if source == "db":
        known = selectors.agents_known()
        if agent not in known:
            there = f"known are {', '.join(known)}" if known else "nothing has been decided yet"
            raise DatasetRefused(
                f"no decision of agent {agent!r} is recorded; {there}. Record decisions first, or import a file: "
                f"`manage.py import_feedback FILE --agent {agent}`"
            )
        return DatabaseEvidence(agent)
    if source != "file":
        raise DatasetRefused(f"a source is db or file, found {source!r}")
    if data_file is None:
        raise DatasetRefused("--source file needs --data-file FILE")
    ratings = None if ratings_file is None else Path(ratings_file)
    return FileEvidence(agent, Path(data_file), format=file_format, ratings_path=ratings)


def _made(
    given: EvidenceSource, kind: str, left_out: Counter[str], knobs: dict[str, Any]
) -> PairSet | ExampleSet:
    """The rows of a kind from what is known, without their prompts."""
    evidence = given.evidence(left_out)
    if kind == Snapshot.Kind.PAIRS:
        return pairs_from_evidence(evidence, **knobs)
    if kind == Snapshot.Kind.PROMPTS:
        for _ in evidence:
            pass  # the prompts are known when all of it was read
        return prompt_examples(given.prompt_hashes())
    return examples_from_evidence(_with_rewards(given, evidence, kind), kind)


def _sampled(rows: PairSet | ExampleSet, max_samples: int | None) -> PairSet | ExampleSet:
    if max_samples is None:
        return rows
    return sampled(rows, max_samples) if isinstance(rows, PairSet) else examples_sampled(rows, max_samples)


def _with_rewards(
    given: EvidenceSource, evidence: Iterator[Evidence], kind: str
) -> Iterator[Evidence | Rewarded]:
    yield from evidence
    if kind in REWARDED:
        yield from given.rewarded()


def _check_enough(
    agent: str, kind: str, tally: _Tally, need: int, source: str, left_out: Counter[str], for_training: bool
) -> None:
    found, train = sum(tally.counts.values()), tally.counts["train"]
    if found >= need and (train or not for_training):
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common(4) if count)
    advice = (
        f"rate more at /rate/?agent={agent}, or lower --min-samples"
        if source == "db"
        else "give a larger file, or lower --min-samples"
    )
    short = f"{need} needed" if found < need else "none of them in the train split"
    raise DatasetRefused(
        f"{found} {kind} found for agent {agent}, {short}{f' (left out: {reasons})' if reasons else ''}: {advice}"
    )


# --- Rows -------------------------------------------------------------------------------------------------


def _rows(
    agent: str, given: EvidenceSource, pairs: PairSet | ExampleSet, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    """The pairs with their prompts, in order, reading the prompts of PROMPTS_AT_ONCE pairs at a time."""
    for start in range(0, len(pairs.rows), PROMPTS_AT_ONCE):
        chunk = pairs.rows[start : start + PROMPTS_AT_ONCE]
        prompts = given.prompts(list(dict.fromkeys(pair.prompt_hash for pair in chunk)))
        for pair in chunk:
            prompt = prompts[pair.prompt_hash]
            messages = messages_plain(prompt.messages)
            if messages is None:
                left_out["not_text"] += 1
            elif isinstance(pair, Pair):
                yield _row(agent, pair, prompt, messages)
            else:
                yield _example_row(agent, pair, prompt, messages)


def _row(agent: str, pair: Pair, prompt: Prompt, messages: list[dict[str, Any]]) -> dict[str, Any]:
    chosen, rejected = pair.chosen, pair.rejected
    if isinstance(chosen, list) or isinstance(rejected, list):
        # a trainer takes two texts or two lists, never one of each
        chosen, rejected = _as_messages(chosen), _as_messages(rejected)
    row: dict[str, Any] = {
        "prompt": messages,
        "chosen": chosen,
        "rejected": rejected,
        "prompt_hash": pair.prompt_hash,
        "agent": agent,
        "source": pair.source,
        "margin": pair.margin,
        "votes": pair.votes,
        "split": pair.split,
        "tags": list(pair.tags),
        "state": prompt.state,
        "simulated": pair.simulated,
    }
    if prompt.tools:
        row["tools"] = prompt.tools
    if pair.split != "train":
        row |= {"preferred": list(pair.preferred), "dispreferred": list(pair.dispreferred)}
    return row


def _example_row(
    agent: str, example: Example, prompt: Prompt, messages: list[dict[str, Any]]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt": messages,
        **example.content,
        "prompt_hash": example.prompt_hash,
        "agent": agent,
        "source": example.source,
        "votes": example.votes,
        "split": example.split,
        "tags": list(example.tags),
        "state": prompt.state,
        "simulated": example.simulated,
    }
    if prompt.tools:
        row["tools"] = prompt.tools
    return row


def _as_messages(completion: Completion) -> list[dict[str, Any]]:
    return completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]


def messages_plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages whose content is plain text: lists of text parts are joined. None where another kind of part is among
    them."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            if not all(isinstance(text, str) for text in texts):
                return None
            message = {**message, "content": "".join(text for text in texts if text)}
        plain.append(message)
    return plain


# --- The file ---------------------------------------------------------------------------------------------


@contextmanager
def _temporary_file(folder: Path) -> Iterator[IO[bytes]]:
    """A new file in the folder, gone again unless it was kept; says what to do where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-", suffix=".jsonl", delete=False) as file:
            try:
                yield file
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        raise DatasetRefused(
            f"the snapshot cannot be written to {folder}: {error.strerror or error}. Nothing was kept; free some "
            "space, make the folder writable, or set RATCHET_HOME to another folder"
        ) from error


def _write(file: IO[bytes], rows: Iterable[dict[str, Any]]) -> str:
    """Write JSON lines, through to the disk. Returns their SHA-256."""
    digest = hashlib.sha256()
    for row in rows:
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        digest.update(line)
        file.write(line)
    file.flush()
    os.fsync(file.fileno())
    return digest.hexdigest()


def _keep(file: IO[bytes], sha256: str) -> Path:
    """Give a written file its name for good, read-only. The same content may be there already: it is the same file."""
    path = Path(file.name).with_name(f"{sha256[:16]}.jsonl")
    os.fchmod(file.fileno(), 0o444)
    Path(file.name).replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too, must survive a power cut
    finally:
        os.close(folder)
    return path


def _snapshot_of(**facts: Any) -> Snapshot:
    """The row of a snapshot file: the one there is for the same content, or a new one."""
    same = {name: facts[name] for name in ("agent", "kind", "sha256")}
    with transaction.atomic():
        return Snapshot.objects.filter(**same).order_by("id").first() or Snapshot.objects.create(**facts)


def snapshot_rows(snapshot: Snapshot, split: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a snapshot, of one split or of all, after checking that its file is what it was.

    Raises DatasetRefused, before the first row, where the file is gone or was changed.
    """
    path: Path = settings.RATCHET_HOME / snapshot.path
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != snapshot.sha256:
                raise DatasetRefused(
                    f"the file of snapshot {snapshot.pk} was changed: {path} has SHA-256 {found[:16]}..., expected "
                    f"{snapshot.sha256[:16]}...; restore it from a backup, or prepare a new dataset"
                )
            file.seek(0)
            for line in file:
                row = json.loads(line)
                if split is None or row["split"] == split:
                    yield row
    except OSError as error:
        raise DatasetRefused(
            f"the file of snapshot {snapshot.pk} cannot be read: {path}: {error.strerror or error}; "
            "restore it from a backup, or prepare a new dataset"
        ) from error


@dataclass(frozen=True)
class HeldOut:
    """One held-out prompt: what an evaluation asks, and which answers people put above and below others."""

    prompt_hash: str
    messages: list[dict[str, Any]]
    state: Any
    preferred: list[Completion]
    dispreferred: list[Completion]


def held_out(snapshot: Snapshot, split: str = "holdout") -> Iterator[HeldOut]:
    """Every prompt of a held-out split, once. Raises DatasetRefused as `snapshot_rows` does."""
    if split not in ("eval", "holdout"):
        raise DatasetRefused(f"a held-out split is eval or holdout, found {split!r}")
    for row in snapshot_rows(snapshot, split):
        yield HeldOut(row["prompt_hash"], row["prompt"], row["state"], row["preferred"], row["dispreferred"])
