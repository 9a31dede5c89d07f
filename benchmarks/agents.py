"""Does each method teach each built-in agent what a simulated team likes, on prompts nobody rated, and coins nothing?

    python benchmarks/agents.py [--agents widgets,filer,...] [--methods dpo,kto,sft,ppo,grpo,linear] [--prompts 240]
                                [--unseen 200] [--seeds 0,1,2] [--taste team|situation|drifting] [--steps N]
                                [--cells FILE.jsonl] [--json]

One cell: feedback of a simulated rater (one thumb in ten flipped; `rl.agents.worlds`) on so many prompts, training
with the default settings of a laptop, and the policy's answer to unseen prompts, as it is served: chosen where the
prompt lists what may be answered, by the assistant written at temperature 1 (greedily, one that prefers neither of two
tones always takes the same one). Its worth is the taste itself, in [0, 1]; the figure is the mean paired difference
in points, with a 95 % interval, from the base model, or from an even choice among the options where that is worth more:
a base whose habits people happen to dislike is beaten by a coin. Every cell has a control: the same with shuffled
feedback (PPO and GRPO: a coin as their reward), which must not be above zero. With one seed the interval is over
prompts and says nothing of another training; with three and more it is over the seeds (Student's t). A cell that
cannot learn says why before training: the preflight refuses, or the method does not apply. The last line is the mean
over all controls, each one draw.

By method: dpo pairs of a liked and a disliked answer; kto two thumbs a prompt; sft the best answer as a correction;
linear the thumbs of kto; ppo and grpo the taste of what they sample as their reward (`--steps` cuts them short).
preferred_pairs and preferred_thumbs, when named: SFT on the answers of dpo's and kto's feedback that won or were liked.

With --cells each cell is kept in a JSON-lines file and not run again. Prints a markdown table, or one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rl.agents import AGENTS  # noqa: E402
from rl.agents.base import Agent, Scenario  # noqa: E402
from rl.agents.worlds import TASTES, TEAM, scenarios_of  # noqa: E402
from rl.rewards.base import RewardSample, RewardValue  # noqa: E402

METHODS = ("dpo", "kto", "sft", "ppo", "grpo", "linear")
SAMPLED = ("ppo", "grpo")
PREFERRED = {"preferred_pairs": "dpo", "preferred_thumbs": "kto"}
"""SFT on the preferred answers (`teacher=preferred`), and the method whose very feedback it hears; only when named."""
NOISE = 0.1
SAMPLING_SEED = 7
EVAL_SHARE = 0.15
"""Of the rated prompts, those that early stopping watches."""


@dataclass(frozen=True)
class Cell:
    """One training."""

    agent: str
    method: str
    seed: int
    control: bool
    prompts: int
    unseen: int
    taste: str
    steps: int
    """Most steps of PPO and GRPO; 0: as many as the recipe makes."""
    base: str
    """The first digits of the base model's SHA-256: another base is another cell."""


class Rater:
    """One simulated rater of an agent, or a coin in their place."""

    def __init__(self, agent: Agent, cell: Cell) -> None:
        self.agent, self.cell = agent, cell
        self.random = Random(f"{cell.agent}/{cell.seed}/rater")

    def worth(self, state: Mapping[str, Any], response: str) -> float:
        return self.agent.hidden_preference(state, response)

    def thumb(self, state: Mapping[str, Any], response: str) -> bool:
        liked = self.worth(state, response) >= 0.5
        return liked != (self.random.random() < NOISE)

    def rows(self, scenarios: Sequence[Scenario]) -> list[dict[str, Any]]:
        """Training rows as the method's dataset has them; of a control with what was said dealt out anew."""
        made = [row for scenario in scenarios for row in self._rows(scenario)]
        if self.cell.control:
            SHUFFLES[self.cell.method](made, Random(f"{self.cell.seed}/shuffled"))
        return made

    def _rows(self, scenario: Scenario) -> list[dict[str, Any]]:
        state = dict(scenario.state)
        shown = {"prompt": self.agent.render(state), "prompt_hash": scenario.key, "state": state}
        answers = self.agent.candidates(state)
        if self.cell.method in SAMPLED:
            return [shown]
        if self.cell.method == "sft":
            best = max(answers, key=lambda answer: self.worth(state, answer))
            wrong = self.random.random() < NOISE
            return [{**shown, "completion": self.random.choice(answers) if wrong else best, "among": answers}]
        if self.cell.method == "dpo":
            if self.cell.control:
                # of any two answers: were one of them always liked, how often an answer is seen would tell the taste
                chosen, rejected = self.random.sample(answers, 2)
                return [{**shown, "chosen": chosen, "rejected": rejected}]
            liked = [answer for answer in answers if self.worth(state, answer) >= 0.5]
            sides = [
                self.random.choice(liked),
                self.random.choice([answer for answer in answers if answer not in liked]),
            ]
            if self.random.random() < NOISE:
                sides.reverse()
            return [{**shown, "chosen": sides[0], "rejected": sides[1]}]
        rated = self.random.sample(answers, 2)
        return [
            {**shown, "completion": answer, "label": thumb, "score": float(thumb)}
            for answer in rated
            for thumb in [self.thumb(state, answer)]
        ]


def _thumbs_dealt(rows: list[dict[str, Any]], random: Random) -> None:
    labels = random.sample([row["label"] for row in rows], len(rows))
    for row, label in zip(rows, labels, strict=True):
        row |= {"label": label, "score": float(label)}


def _corrections_dealt(rows: list[dict[str, Any]], random: Random) -> None:
    for row in rows:
        row["completion"] = random.choice(row["among"])


SHUFFLES: dict[str, Callable[[list[dict[str, Any]], Random], None]] = {
    "dpo": lambda rows, random: None,  # their pairs are drawn from all answers
    "kto": _thumbs_dealt,
    "linear": _thumbs_dealt,
    "sft": _corrections_dealt,
    "ppo": lambda rows, random: None,  # their reward is the coin
    "grpo": lambda rows, random: None,
}


class Reward:
    """The taste as a reward; of a control a number drawn by the words of prompt and answer."""

    name = "taste"

    def __init__(self, agent: Agent, control: bool) -> None:
        self.agent, self.control = agent, control

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        return [RewardValue(4 * self._share(sample) - 2) for sample in samples]

    def _share(self, sample: RewardSample) -> float:
        if self.control:
            said = json.dumps([list(sample.prompt), sample.response])
            return int.from_bytes(hashlib.sha256(said.encode()).digest()[:4]) / 2**32
        return self.agent.hidden_preference(sample.facts["state"], sample.response)


class Bench:
    """Everything cells of one agent, seed and size have in common."""

    def __init__(self, cell: Cell) -> None:
        self.agent = AGENTS[cell.agent]
        every = scenarios_of(self.agent, cell.taste, cell.prompts + cell.unseen, cell.seed)
        self.rated, self.unseen = every[: cell.prompts], every[cell.prompts :]
        if cell.taste == "drifting":
            # taste changed half way through: what is unseen is of the newer one, as users would be
            self.rated, self.unseen = every[-cell.prompts :], every[: cell.unseen]

    def worths(self, answers: Sequence[str]) -> list[float]:
        return [
            self.agent.hidden_preference(scenario.state, answer)
            for scenario, answer in zip(self.unseen, answers, strict=True)
        ]

    def answers(self, adapter: str | None) -> list[str]:
        """Answers of a policy to the unseen prompts as it is served; None names the base."""
        from rl.linear.model import WEIGHTS, LinearPolicy
        from rl.training.hardware import detect
        from rl.training.policy import generate, load_policy
        from rl.training.sides import LinearSide, generate_answers

        prompts = [self.agent.render(scenario.state) for scenario in self.unseen]
        states = [scenario.state for scenario in self.unseen]
        policy: Any
        if adapter is not None and (Path(adapter) / WEIGHTS).is_file():
            policy = LinearSide(LinearPolicy.load(Path(adapter)), self.agent)
        else:
            policy = load_policy("bundled", adapter, hardware=detect())
            if not any(map(self.agent.choices, states)):
                length = self.agent.max_new_tokens
                written = generate(
                    policy, prompts, max_new_tokens=length, temperature=1.0, seed=SAMPLING_SEED
                )
                return [answer.text for answer in written]
        return [answer.text for answer in generate_answers(policy, prompts, self.agent, states=states)]

    @cached_property
    def base(self) -> list[float]:
        return self.worths(self.answers(None))

    @cached_property
    def even(self) -> list[float]:
        """Worth of an even choice among the options of each unseen prompt."""
        return [
            math.fsum(worths) / len(worths)
            for scenario in self.unseen
            for worths in [
                [
                    self.agent.hidden_preference(scenario.state, answer)
                    for answer in self.agent.candidates(scenario.state)
                ]
            ]
        ]

    def run(self, cell: Cell, folder: Path) -> dict[str, Any]:
        """Train and judge one cell; `refused` where it says beforehand that it cannot learn."""
        from rl.linear.rows import LinearRefused
        from rl.statistics import mean_interval
        from rl.training.result import TrainingRefused

        began = time.process_time()
        try:
            made = self._trained(cell, folder)
        except (TrainingRefused, LinearRefused) as refusal:
            return {"refused": str(refusal), "seconds": round(time.process_time() - began, 1)}
        if made.get("status") not in (None, "succeeded"):
            return {"refused": made["reason"], "seconds": round(time.process_time() - began, 1)}
        own = self.worths(self.answers(made.pop("adapter")))
        gains = [
            mine - theirs for mine, theirs in zip(own, max(self.base, self.even, key=math.fsum), strict=True)
        ]
        return {
            **made,
            "base_worth": math.fsum(self.base) / len(self.base),
            "even_worth": math.fsum(self.even) / len(self.even),
            "worth": math.fsum(own) / len(own),
            "difference": mean_interval(gains, bounds=(-1.0, 1.0)).as_dict(),
            "gains": [round(gain, 4) for gain in gains],
            "seconds": round(time.process_time() - began, 1),
        }

    def _trained(self, cell: Cell, folder: Path) -> dict[str, Any]:
        feedback, method = PREFERRED.get(cell.method, cell.method), cell.method
        rater = Rater(self.agent, dataclasses.replace(cell, method=feedback))
        cut = max(1, round(EVAL_SHARE * len(self.rated)))
        held, train = rater.rows(self.rated[:cut]), rater.rows(self.rated[cut:])
        if cell.method in PREFERRED:
            from rl.datasets.demonstrations import preferred_rows

            held, train, method = preferred_rows(held), preferred_rows(train), "sft"
        if cell.method == "linear":
            from rl.linear.fit import fit

            return {"adapter": str(fit([*train, *held], self.agent).policy.save(folder).parent)}
        from rl.recipes import RECIPES
        from rl.recipes.methods import method_named
        from rl.training.hardware import detect
        from rl.training.preflight import train_with_checks
        from rl.training.result import Silent

        recipe = RECIPES[method]["cpu"].with_knobs(seed=cell.seed).fit_to_rows(len(train))
        more: dict[str, Any] = {}
        if cell.method in SAMPLED:
            if cell.steps:
                recipe = recipe.with_knobs(max_steps=min(cell.steps, recipe.steps(len(train))))
            more = {"rewards": [Reward(self.agent, cell.control)]}
        module, _, name = method_named(method).trainer.partition(":")
        trainer = getattr(importlib.import_module(module), name)(
            recipe, "bundled", output_dir=folder, agent=cell.agent, hardware=detect(), **more
        )
        result = train_with_checks(trainer, recipe, train, held, agent=cell.agent, listener=Silent())
        return {
            "status": result.status,
            "reason": "; ".join(result.notes),
            "trained_steps": result.steps,
            "valid": {when: look["share"] for when, look in result.preflight.items()},
            "stopped_early": result.stopped_early,
            "adapter": result.checkpoint,
        }


# --- The table ------------------------------------------------------------------------------------------------


def cells_read(path: Path | None) -> dict[str, dict[str, Any]]:
    """Cells of earlier runs, by their key."""
    found: dict[str, dict[str, Any]] = {}
    if path is not None and path.is_file():
        for line in path.read_text("utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a line that a kill cut short is run again
                row = json.loads(line)
                found[key_of(row)] = row
    return found


def key_of(row: Mapping[str, Any]) -> str:
    return json.dumps([row[name] for name in Cell.__dataclass_fields__])


def pooled(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One cell of the table: the gains of every seed as one sample (from three seeds on each seed's mean as one draw),
    or why there are none."""
    from rl.statistics import mean_interval

    refused = [row["refused"] for row in rows if "refused" in row]
    gains = [row["gains"] for row in rows if row.get("gains")]
    if not gains:
        return {"refused": refused[0] if refused else "not run"}
    seeds = [row["worth"] for row in rows if "worth" in row]
    by_seed = [math.fsum(of_seed) / len(of_seed) for of_seed in gains]
    return {
        **mean_interval(
            by_seed if len(gains) > 2 else [gain for of_seed in gains for gain in of_seed], bounds=(-1.0, 1.0)
        ).as_dict(),
        "worth": math.fsum(seeds) / len(seeds),
        "base_worth": math.fsum(row["base_worth"] for row in rows if "worth" in row) / len(seeds),
        "even_worth": math.fsum(row["even_worth"] for row in rows if "worth" in row) / len(seeds),
        "seconds": max(row["seconds"] for row in rows),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Agent -> method -> {"taste", "shuffled", "verdict"}."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    groups: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["agent"], row["method"], row["control"]), []).append(row)
    for agent, method, control in groups:
        if control:
            continue
        cell: dict[str, Any] = {"taste": pooled(groups[agent, method, False])}
        cell["shuffled"] = pooled(groups.get((agent, method, True), []))
        cell["verdict"] = verdict(cell)
        found.setdefault(agent, {})[method] = cell
    return found


def verdict(cell: Mapping[str, Mapping[str, Any]]) -> str:
    """`learns`, `cannot` with its reason told beforehand, or what is wrong."""
    taste, shuffled = cell["taste"], cell["shuffled"]
    if "refused" in taste:
        return "cannot"
    if shuffled.get("low") is not None and shuffled["low"] > 0:
        return "learns from coins"
    return "learns" if taste["low"] is not None and taste["low"] > 0 else "does not learn"


def markdown(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    methods = [method for method in (*METHODS, *PREFERRED) if any(method in row for row in found.values())]
    lines = [
        "| agent | base | even choice | " + " | ".join(methods) + " |",
        "| --- | --- | --- |" + " --- |" * len(methods),
    ]
    reasons: dict[str, int] = {}
    for agent, row in found.items():
        worths = next(
            (
                [c["taste"]["base_worth"], c["taste"]["even_worth"]]
                for c in row.values()
                if "base_worth" in c["taste"]
            ),
            None,
        )
        cells = [_shown(row.get(method), reasons) for method in methods]
        lines.append(
            f"| {agent} | {_percent(worths, 0)} | {_percent(worths, 1)} | " + " | ".join(cells) + " |"
        )
    footnotes = [f"({number}) {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "", *footnotes, controls_line(found)])


def controls_line(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Mean gain over all controls, each of which is one draw: trainings on noise end up somewhere."""
    from rl.statistics import mean_interval

    gains = [
        cell["shuffled"]["value"]
        for row in found.values()
        for cell in row.values()
        if "value" in cell["shuffled"]
    ]
    if len(gains) < 2:
        return ""
    return f"{len(gains)} controls: {_points(mean_interval(gains, bounds=(-1.0, 1.0)).as_dict())} points on average"


def _percent(worths: Sequence[float] | None, place: int) -> str:
    return "" if worths is None else f"{100 * worths[place]:.0f}"


def _shown(cell: Mapping[str, Any] | None, reasons: dict[str, int]) -> str:
    if cell is None:
        return ""
    if "refused" in cell["taste"]:
        return f"cannot ({reasons.setdefault(cell['taste']['refused'], len(reasons) + 1)})"
    marks = {"learns": "**", "does not learn": "", "learns from coins": ""}
    mark = marks[cell["verdict"]]
    said = f"{mark}{_points(cell['taste'])}{mark}"
    return f"{said}, shuffled {_points(cell['shuffled'])}" if "low" in cell["shuffled"] else said


def _points(found: Mapping[str, Any]) -> str:
    if found.get("low") is None:
        return f"{100 * found['value']:+.0f}"
    return f"{100 * found['value']:+.0f} [{100 * found['low']:+.0f}, {100 * found['high']:+.0f}]"


def base_digest() -> str:
    weights = ROOT / "rl" / "bundled_model" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", default=",".join(sorted(AGENTS)))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--unseen", type=int, default=200)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--taste", choices=list(TASTES), default=TEAM)
    parser.add_argument(
        "--steps", type=int, default=0, help="of PPO and GRPO, at most (default: the recipe's)"
    )
    parser.add_argument("--no-controls", action="store_true", help="leave the shuffled feedback out")
    parser.add_argument("--cells", type=Path, metavar="FILE", help="keep each cell here, and run none twice")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    done, rows, benches = cells_read(options.cells), [], {}
    base = base_digest()
    cells = [
        Cell(
            agent,
            method,
            int(seed),
            control,
            options.prompts,
            options.unseen,
            options.taste,
            options.steps if method in SAMPLED else 0,
            "" if method == "linear" else base,
        )
        for agent in options.agents.split(",")
        for seed in options.seeds.split(",")
        for method in options.methods.split(",")
        for control in ((False,) if options.no_controls else (False, True))
    ]
    for cell in cells:
        key = key_of(cell.__dict__)
        if key not in done:
            place = (cell.agent, cell.seed)
            if place not in benches:
                benches = {place: Bench(cell)}
            with tempfile.TemporaryDirectory(prefix="ratchet-agents-") as folder:
                done[key] = {**cell.__dict__, **benches[place].run(cell, Path(folder) / "run")}
            if options.cells is not None:
                with options.cells.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[key]) + "\n")
            told = done[key].get("refused") or _points(done[key]["difference"])
            named = f"{cell.agent:<12}{cell.method:<8}{'shuffled' if cell.control else 'taste':<10}"
            print(f"{named}{done[key]['seconds']:>6} s  {told[:100]}", file=sys.stderr, flush=True)
        rows.append(done[key])
    found = table(rows)
    if options.json:
        report = {"benchmark": "agents", "taste": options.taste, "prompts": options.prompts, "table": found}
        print(json.dumps({**report, "unseen": options.unseen, "base": base}))
    else:
        print(markdown(found))


if __name__ == "__main__":
    main()
