"""Share of liked answers to unseen prompts after training with default settings, in made-up worlds, beside classifiers.

    python benchmarks/worlds.py [--worlds kept|tuned|NAME,...] [--sizes 300,1000] [--unseen 150] [--seed 0]
                                [--fast] [--new-words] [--method auto] [--kind KIND] [--set KEY=VALUE ...]

Six worlds are there to tune recipes over, six others are kept aside for the table (`benchmarks/world_tastes.py`). Each
row: a file of feedback on so many prompts, `import_feedback`, `run_pipeline --method auto`, and the policy's choice
among the options for prompts nobody rated. The policy chooses as it is served: the candidate with the largest
log-probability. Beside it, on the same rows the policy was trained with (its train and eval split; the holdout is the
gate's): the product's linear policy, and scikit-learn's gradient boosting on words and the option; the best constant
answer in hindsight; the base model, which RATCHET_BASE_MODEL names. `--method linear`
trains the linear policy as `train_linear` does, on the train split alone. `--fast` trains with the trainer classes,
without a database, which is how recipes were tuned. Prints a table on stderr and one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from world_tastes import (  # noqa: E402
    CORRECTIONS,
    KEPT,
    PAIRS,
    SCORES,
    THUMBS,
    TUNED,
    WORLDS,
    Prompt,
    World,
    new_phrases,
    rated_phrases,
)

from rl.agents import AGENTS  # noqa: E402
from rl.agents.base import Agent  # noqa: E402
from rl.bundled_models import BUNDLED  # noqa: E402
from rl.linear.fit import FittedPolicy, fit  # noqa: E402
from rl.linear.model import WEIGHTS, LinearPolicy  # noqa: E402

MIN_EVIDENCE = 30
"""Held-out prompts the gate asks for, which decides how many are held out."""


def base_model() -> str:
    """The base model that is trained here, as the settings name it."""
    return os.environ.get("RATCHET_BASE_MODEL") or BUNDLED


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def rows_split(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The sides the rows' prompts would stand on in a database that sees them for the first time: near-identical ones
    together."""
    from rl.datasets.holdout import draw_splits
    from rl.datasets.prompt_clusters import ClusteredPrompt, clusters_of, prompt_text

    hashes = [hashlib.sha256(row["prompt"].encode()).hexdigest() for row in rows]
    prompts = {
        name: ClusteredPrompt(prompt_text(messages(row["prompt"])), "", "")
        for name, row in zip(hashes, rows, strict=True)
    }
    sides = draw_splits(
        {},
        set(hashes),
        min_evidence=MIN_EVIDENCE,
        clusters=lambda names: clusters_of({name: prompts[name] for name in names}),
    )
    split: dict[str, list[dict[str, Any]]] = {"train": [], "eval": [], "holdout": []}
    for row, name in zip(rows, hashes, strict=True):
        split[sides[name]].append(row)
    return split


# --- Classifiers -------------------------------------------------------------------------------------------------


def linear_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as a snapshot of pairs, corrections or scores has them."""
    made = []
    for row in rows:
        one: dict[str, Any] = {"prompt": messages(row["prompt"]), "prompt_hash": row["prompt"]}
        if "chosen" in row:
            one |= {"chosen": row["chosen"], "rejected": row["rejected"]}
        elif "correction" in row:
            one |= {"completion": row["correction"]}
        else:
            one |= {"completion": row["response"], "score": row.get("score", float(row.get("thumb") == "up"))}
        made.append(one)
    return made


def linear_fitted(world: World, rows: Sequence[dict[str, Any]]) -> FittedPolicy:
    """The product's own classifier: what `train_linear` makes of these rows."""
    return fit(linear_rows(rows), world_agent(world))


def world_agent(world: World) -> Agent:
    return dataclasses.replace(AGENTS["assistant"], slug=world.agent)


def linear_share(world: World, unseen: Sequence[Prompt], policy: LinearPolicy) -> float:
    scores = [policy.scores(messages(prompt.text), world.options) for prompt in unseen]
    return share(world, unseen, np.array(scores).argmax(1))


def boosting_share(world: World, rows: Sequence[dict[str, Any]], unseen: Sequence[Prompt]) -> float:
    """Liked share of scikit-learn's gradient boosting on words and the option."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.feature_extraction.text import CountVectorizer

    words = CountVectorizer(token_pattern=r"[^\W\d_]+", binary=True).fit([row["prompt"] for row in rows])
    number = {option: float(i) for i, option in enumerate(world.options)}

    def joined(texts: Sequence[str], chosen: Sequence[float]) -> np.ndarray[Any, Any]:
        return np.c_[words.transform(texts).toarray().astype(float), np.array(chosen)]

    given = [row["prompt"] for row in rows]
    if world.kind in (PAIRS, CORRECTIONS):
        names = ("chosen", "rejected") if world.kind == PAIRS else ("correction", "response")
        good, bad = ([number[row[name]] for row in rows] for name in names)
        trees = np.r_[joined(given, good), joined(given, bad)]
        labels = np.r_[np.ones(len(rows)), np.zeros(len(rows))]
    else:
        trees = joined(given, [number[row["response"]] for row in rows])
        labels = np.array([float(row.get("thumb") == "up" or row.get("score", 0) > 0.5) for row in rows])
    forest = HistGradientBoostingClassifier(
        categorical_features=[trees.shape[1] - 1], min_samples_leaf=5, max_iter=150, learning_rate=0.05
    ).fit(trees, labels)
    asked = [prompt.text for prompt in unseen]
    scores = [forest.decision_function(joined(asked, [value] * len(unseen))) for value in number.values()]
    return share(world, unseen, np.stack(scores, 1).argmax(1))


def share(world: World, unseen: Sequence[Prompt], chosen: Sequence[Any]) -> float:
    """Of the prompts, those whose chosen option people like."""
    return sum(int(c) in world.liked(p) for c, p in zip(chosen, unseen, strict=True)) / len(unseen)


def best_constant(world: World, unseen: Sequence[Prompt]) -> float:
    return max(share(world, unseen, [option] * len(unseen)) for option in range(len(world.options)))


# --- Policies ----------------------------------------------------------------------------------------------------


def policy_share(world: World, unseen: Sequence[Prompt], adapter: str | None) -> float:
    """Of the prompts, those for which the policy's likeliest candidate is liked."""
    if adapter is not None and (Path(adapter) / WEIGHTS).is_file():
        return linear_share(world, unseen, LinearPolicy.load(Path(adapter)))
    from rl.training.hardware import detect
    from rl.training.policy import load_policy
    from rl.training.scoring import score_responses

    policy = load_policy(base_model(), adapter, hardware=detect())
    count = len(world.options)
    scores = score_responses(
        policy, [(messages(prompt.text), option) for prompt in unseen for option in world.options]
    )
    logps = np.array([score.logp for score in scores]).reshape(len(unseen), count)
    return share(world, unseen, logps.argmax(1))


def method_rows(rows: Sequence[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    """Rows as the trainer of a method reads them."""
    made: list[dict[str, Any]] = []
    for row in rows:
        prompt = {"prompt": messages(row["prompt"])}
        if method == "dpo":
            chosen = row.get("chosen") or row["correction"]
            made.append({**prompt, "chosen": chosen, "rejected": row.get("rejected") or row["response"]})
        elif method == "sft":
            made.append(
                {**prompt, "completion": row.get("correction") or row.get("chosen") or row["response"]}
            )
        elif row.get("score") != 0.5:
            good = row.get("thumb") == "up" or row.get("score", 0) > 0.5
            made.append({**prompt, "completion": row["response"], "label": good})
    return made


def trained_fast(
    world: World, rows: Sequence[dict[str, Any]], options: argparse.Namespace, home: Path
) -> dict[str, Any]:
    from rl.recipes import RECIPES
    from rl.recipes.methods import method_named
    from rl.training.hardware import detect
    from rl.training.result import Silent

    method = "linear" if options.method == "auto" else options.method
    split = rows_split(rows)
    if method == "linear":
        found = linear_fitted(world, split["train"])
        return {
            "method": method,
            "steps": 1,
            "total_steps": 1,
            "adapter": str(found.policy.save(home).parent),
        }
    knobs = dict(pair.split("=", 1) for pair in options.set)
    train, held = method_rows(split["train"], method), method_rows(split["eval"], method)
    recipe = RECIPES[method]["cpu"].with_knobs(**knobs).fit_to_rows(len(train))
    module, _, name = method_named(method).trainer.partition(":")
    trains = getattr(importlib.import_module(module), name)
    trainer = trains(
        recipe,
        base_model(),
        output_dir=home,
        agent=world.agent,
        hardware=detect(),
        listener=Silent(),
        cache_dir=None,
    )
    result = trainer.train(train, held)
    return {
        "method": method,
        "steps": result.steps,
        "total_steps": result.total_steps,
        "best_step": result.best_step,
        "seconds": result.seconds,
        "adapter": result.checkpoint,
        "learnt": [*split["train"], *split["eval"]],
    }


def trained_by_commands(
    world: World, rows: Sequence[dict[str, Any]], options: argparse.Namespace, home: Path
) -> dict[str, Any]:
    import shapes

    shapes.AGENT = world.agent
    desk = shapes.Desk(home)
    desk.migrate()
    file = home / "feedback.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    desk.command("import_feedback", str(file), "--agent", world.agent)
    knobs = [word for pair in options.set for word in ("--set", pair)]
    made = desk.command(
        "run_pipeline",
        "--agent",
        world.agent,
        "--method",
        options.method,
        *knobs,
        check=False,
    )
    if "training" not in made:
        raise SystemExit(f"{world.agent}: run_pipeline trained nothing: {made.get('refused', made)}")
    names = ("method", "steps", "total_steps", "best_step")
    snapshots = (home / "snapshots" / world.agent).glob("*.jsonl")
    texts = {
        row["prompt"][-1]["content"]
        for snapshot in snapshots
        for row in map(json.loads, snapshot.read_text("utf-8").splitlines())
        if row["split"] in ("train", "eval")
    }
    training = made["training"]
    kept = Path(training["checkpoint"]).with_name(training["policy"])  # of `auto`: the best on the eval split
    found = {name: training.get(name) for name in names}
    if (kept / WEIGHTS).is_file():
        found["method"] = "linear"
    return found | {"adapter": str(kept), "learnt": [row for row in rows if row["prompt"] in texts]}


def measured(world: World, size: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row of the table."""
    from rl.statistics import wilson_interval

    rated, new = (rated_phrases, new_phrases) if options.new_words else (list, list)
    prompts = world.prompts(size, options.seed, phrases=rated)
    unseen = world.prompts(options.unseen, options.seed + 1000, prompts, phrases=new)
    rows = world.feedback(prompts, options.seed)
    began = time.perf_counter()
    train = trained_fast if options.fast else trained_by_commands
    made = train(world, rows, options, folder / f"{world.agent}-{size}")
    seconds = time.perf_counter() - began
    found = {"world": world.agent, "kind": world.kind, "options": len(world.options), "prompts": size, **made}
    if made["adapter"]:
        liked = policy_share(world, unseen, made["adapter"])
        interval = wilson_interval(round(liked * len(unseen)), len(unseen))
        found |= {"liked": liked, "low": interval.low, "high": interval.high}
    learnt = found.pop("learnt")
    found |= {
        "base": policy_share(world, unseen, None),
        "constant": best_constant(world, unseen),
        "linear": linear_share(world, unseen, linear_fitted(world, learnt).policy),
        "boosting": boosting_share(world, learnt, unseen),
        "seconds": round(seconds, 1),
    }
    return found


def line(row: dict[str, Any]) -> str:
    liked = (
        f"{100 * row['liked']:.0f} ({100 * row['low']:.0f} to {100 * row['high']:.0f})"
        if "liked" in row
        else "-"
    )
    rest = "".join(f"{100 * row[name]:>9.0f}" for name in ("base", "constant", "linear", "boosting"))
    steps = f"{row.get('best_step') or row.get('steps')} of {row.get('total_steps')}"
    return (
        f"{row['world']:<14}{row['kind']:<12}{row['options']:>3}{row['prompts']:>6}  {row['method'] or '-':<5}"
        f"{liked:>15}{rest}  {steps:>12}{row['seconds']:>7.0f}"
    )


HEADING = (
    f"{'world':<14}{'feedback':<12}{'k':>3}{'n':>6}  {'by':<5}{'liked, %':>15}{'base':>9}{'constant':>9}{'linear':>9}"
    f"{'boosting':>9}  {'kept step':>12}{'s':>7}"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", default="kept")
    parser.add_argument("--sizes", default="300,1000")
    parser.add_argument("--unseen", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument(
        "--new-words", action="store_true", help="unseen prompts are in phrases no rated one has"
    )
    parser.add_argument("--method", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--home", type=Path, help="keep the data folders here")
    parser.add_argument(
        "--kind", choices=[PAIRS, THUMBS, CORRECTIONS, SCORES], help="feedback in place of the world's own"
    )
    options = parser.parse_args()
    named = {"kept": KEPT, "tuned": TUNED}.get(options.worlds)
    worlds = named or [WORLDS[name] for name in options.worlds.split(",")]
    if options.kind:
        worlds = [dataclasses.replace(world, kind=options.kind) for world in worlds]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    print(HEADING, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="ratchet-worlds-") as temporary:
        for size in map(int, options.sizes.split(",")):
            for world in worlds:
                rows.append(measured(world, size, options, options.home or Path(temporary)))
                print(line(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "worlds", "seed": options.seed, "unseen": options.unseen, "rows": rows}))


if __name__ == "__main__":
    main()
