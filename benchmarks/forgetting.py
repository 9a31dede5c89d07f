"""Does a retrain forget? Ratings of three kinds of question first, then of three others; four ways to retrain.

    python benchmarks/forgetting.py [--scenarios 300] [--steps 24]

The bundled model learns the first three kinds and becomes champion; then ratings of the other three arrive. Each way to
retrain (base or champion, seeing so much of the older feedback again) is trained through the same services as the
online learner's and judged against that champion on held-out prompts. `older` are prompts whose feedback the champion
knew, `newer` the others: share of them on which the preferred response is the likelier one. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FIRST = ("trend", "compare", "share")
WAYS = (("base", 1.0), ("champion", 1.0), ("champion", 0.25), ("champion", 0.0))


def rate(intents: set[str], scenarios: int) -> int:
    """Four candidates of each scenario of these kinds, each with a thumb by the hidden taste. Returns the ratings."""
    from feedback.services import decision_record, rating_submit
    from rl.agents.widgets import AGENT

    wanted = [one for one in AGENT.scenarios() if one.state["intent"] in intents]
    picked = wanted[:: max(1, len(wanted) // scenarios)][:scenarios]
    for scenario in picked:
        for response in AGENT.candidates(scenario.state):
            decision = decision_record(
                agent="widgets",
                messages=AGENT.render(scenario.state),
                response=response,
                state=scenario.state,
            ).row
            thumb = "up" if AGENT.hidden_preference(scenario.state, response) >= 0.5 else "down"
            rating_submit(decision=decision, rater="benchmark", thumb=thumb)
    return 4 * len(picked)


def judged(policy: str, against: str) -> dict[str, Any]:
    """Accuracy on older and newer held-out prompts, and what the gate says of forgetting."""
    from rl.evaluation.service import EvaluationOrder, evaluate
    from rl.gates.report import NEWER, OLDER
    from rl.gates.rules import gate_judge
    from rl.models import Evaluation
    from rl.registry.gate_evidence import evidence_of, gate_bounds

    found = evaluate(EvaluationOrder(policy=policy, compare=against, actor="benchmark"))
    evidence = evidence_of(Evaluation.objects.get(pk=found["evaluation"]))
    shares: dict[str, Any] = {}
    for name, slice_name in (("older", OLDER), ("newer", NEWER)):
        cases = [case for case in evidence.cases if slice_name in case.slices]
        shares[name] = {
            "accuracy": round(sum(case.policy_score for case in cases) / len(cases), 3),
            "champion": round(sum(case.reference_score for case in cases) / len(cases), 3),
            "n": len(cases),
        }
    sheet = gate_judge(evidence, gate_bounds("widgets"))
    (forgetting,) = [verdict for verdict in sheet.verdicts if verdict.rule == "forgetting"]
    return {**shares, "forgetting": forgetting.outcome, "gate": "opened" if sheet.passed else sheet.reason}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenarios", type=int, default=300, help="Rated of each half (default 300)")
    parser.add_argument("--steps", type=int, default=24, help="Optimiser steps of each run (default 24)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-forgetting-") as home:
        os.environ.update(
            RATCHET_HOME=home,
            DATABASE_URL=f"sqlite:///{home}/db.sqlite3",
            HF_HUB_OFFLINE="1",
            DJANGO_SETTINGS_MODULE="backend.settings",
            TOKENIZERS_PARALLELISM="false",
        )
        import django

        django.setup()
        from django.core.management import call_command

        from rl.agents.widgets import AGENT
        from rl.jobs.lifecycle import TrainOrder
        from rl.jobs.train import train
        from rl.models import Learnt
        from rl.registry import service as registry

        call_command("migrate", verbosity=0)
        first = set(FIRST)
        others = {one.state["intent"] for one in AGENT.scenarios()} - first

        def train_with(**knobs: Any) -> dict[str, Any]:
            knobs |= {"max_steps": options.steps}
            return train(TrainOrder("widgets", config="cpu", knobs=knobs, actor="benchmark"))

        ratings = {"first": rate(first, options.scenarios)}
        champion = train_with()["policy"]
        registry.policy_promote(
            registry.policy_get(champion), actor="benchmark", reason="the first", force=True
        )
        ratings["then"] = rate(others, options.scenarios)
        ways = []
        for start, share in WAYS:
            began = time.monotonic()
            report = train_with(start_from=start, replay_share=share)
            seconds = round(time.monotonic() - began, 1)
            found = judged(report["policy"], champion)
            ways.append(
                {
                    "start_from": start,
                    "replay_share": share,
                    "pairs": report["samples"]["train"],
                    "train_seconds": seconds,
                    **found,
                }
            )
            print(json.dumps(ways[-1]), file=sys.stderr, flush=True)
            # the next way is to find the same feedback new
            Learnt.objects.filter(run_id=report["run"]).delete()
    print(json.dumps({"ratings": ratings, "steps": options.steps, "ways": ways}, indent=2))


if __name__ == "__main__":
    main()
