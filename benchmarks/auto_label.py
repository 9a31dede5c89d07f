"""How far the auto-labeller's confidence can be believed: `python benchmarks/auto_label.py --ratings 500 --noise 0.1`.

Made-up decisions of agent widgets, rated by its hidden preference with some ratings flipped; the label model reads the
base model's embeddings. Prints one JSON object: the figures on ratings left out, and how often it is right about what
was really liked (no flips) on decisions nobody rated. --figure F draws the calibration curve.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from rl.agents import AGENTS
from rl.training.labels import curve_draw, embeddings, figures_of, label_fit
from rl.training.policy import load_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--agent", default="widgets", help="A built-in agent with scenarios (default widgets)."
    )
    parser.add_argument("--ratings", type=int, default=500, help="Ratings it learns from (default 500).")
    parser.add_argument("--fresh", type=int, default=300, help="Decisions nobody rated (default 300).")
    parser.add_argument("--noise", type=float, default=0.1, help="Share of ratings flipped (default 0.1).")
    parser.add_argument("--model", default="bundled", help="Base model (default bundled).")
    parser.add_argument("--figure", type=Path, help="Draw the calibration curve to this PNG.")
    options = parser.parse_args()

    agent, draw = AGENTS[options.agent], random.Random(0)
    scenarios = draw.sample(agent.scenarios(), options.ratings + options.fresh)
    items, liked = [], []
    for scenario in scenarios:
        response = draw.choice(agent.candidates(scenario.state))
        items.append((agent.render(scenario.state), response))
        liked.append(agent.hidden_preference(scenario.state, response) >= 0.5)
    rated = np.array([like != (draw.random() < options.noise) for like in liked[: options.ratings]])
    began = time.monotonic()
    read = embeddings(load_policy(options.model), items)
    read_s = time.monotonic() - began
    found = label_fit(read[: options.ratings], rated, [str(i) for i in range(options.ratings)])
    fit_s = time.monotonic() - began - read_s
    stated = found.model.probabilities(read[options.ratings :])
    fresh = figures_of(stated, np.array(liked[options.ratings :]))
    if options.figure:
        curve_draw(asdict(found.figures), options.figure, f"{options.agent}, {options.ratings} ratings")
    print(
        json.dumps(
            {
                "agent": options.agent,
                "noise": options.noise,
                "left_out": asdict(found.figures),
                "fresh_against_what_was_liked": asdict(fresh),
                "seconds_reading": round(read_s, 1),
                "seconds_fitting": round(fit_s, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
