"""Experiments and their results as OpenAPI components."""

from __future__ import annotations

from backend.rest.schema import Schema, list_schema

NUMBER: Schema = {"type": "number"}
MAYBE_NUMBER: Schema = {"type": ["number", "null"]}
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
MAYBE_TIME: Schema = {"type": ["string", "null"], "format": "date-time"}
VERDICT: Schema = {
    "type": "string",
    "enum": ["collecting", "undecided", "better", "worse", "harm", "mismatch", "control"],
}


def _all_of(properties: dict[str, Schema], **more: object) -> Schema:
    return {
        "type": "object",
        "required": list(properties),
        "properties": properties,
        "additionalProperties": False,
        **more,
    }


INTERVAL = _all_of({"value": MAYBE_NUMBER, "low": MAYBE_NUMBER, "high": MAYBE_NUMBER, "n": COUNT})
UNADJUSTED_RESULT = _all_of(
    {
        "value": NUMBER,
        "low": NUMBER,
        "high": NUMBER,
        "variance_removed": {**NUMBER, "description": "Share of the variance that the adjustment removed"},
        "covariates": list_schema(TEXT),
    }
)
EFFECT = _all_of(
    {
        "value": {**MAYBE_NUMBER, "description": "Arm minus control; of latency as a share of the control's"},
        "low": MAYBE_NUMBER,
        "high": MAYBE_NUMBER,
        "p": {
            **MAYBE_NUMBER,
            "description": "Anytime-valid p-value of no difference (a confidence sequence)",
        },
        "chance": {**SHARE, "description": "Probability of being better than the control"},
        "units": COUNT,
        "needed": {
            "type": ["integer", "null"],
            "description": "Units still needed for a verdict; null: cannot be estimated",
        },
        "state": VERDICT,
        "unadjusted": {
            "anyOf": [UNADJUSTED_RESULT, {"type": "null"}],
            "description": "null without data on the units from before their assignment",
        },
    }
)
GUARD = _all_of(
    {"metric": TEXT, "margin": NUMBER, "loss": MAYBE_NUMBER, "low": MAYBE_NUMBER, "state": VERDICT}
)

PREFERENCE: Schema = {"type": "string", "enum": ["left", "right", "tie", "both_bad"]}
JUDGING_COMPONENTS: dict[str, Schema] = {
    "JudgingRound": _all_of(
        {
            "id": {"type": "integer"},
            "agent": TEXT,
            "policy": TEXT,
            "against": TEXT,
            "status": {"type": "string", "enum": ["waiting", "answering", "running", "ended", "failed"]},
            "prompts": COUNT,
            "pairs": COUNT,
            "raters_each": COUNT,
            "margin": SHARE,
            "attempt": COUNT,
            "verdict": {"type": "string", "enum": ["better", "not_worse", "worse", "open"]},
            "words": {**TEXT, "description": "The verdict in a sentence, with its figures"},
            "wins": COUNT,
            "losses": COUNT,
            "ties": COUNT,
            "same": {**COUNT, "description": "Prompts with equal answers, which nobody is asked about"},
            "both_bad": COUNT,
            "waiting": {**COUNT, "description": "Pairs that need further judgements"},
            "judgements": COUNT,
            "raters": COUNT,
            "share": INTERVAL,
            "confidence": SHARE,
            "further": {
                "type": ["integer", "null"],
                "description": "Answers of people until a verdict, about",
            },
            "reason": TEXT,
            "address": TEXT,
            "created_at": {"type": "string", "format": "date-time"},
            "ended_at": MAYBE_TIME,
        }
    ),
    "JudgingPair": _all_of(
        {
            "pair": {"type": ["string", "null"], "format": "uuid"},
            "messages": {"description": "The prompt, as chat messages"},
            "left": TEXT,
            "right": TEXT,
        }
    ),
    "JudgementStored": _all_of({"pair": TEXT, "preference": PREFERENCE, "status": TEXT}),
    "JudgementSent": _all_of({"pair": {"type": "string", "format": "uuid"}, "preference": PREFERENCE}),
    "JudgingRoundSent": {
        "type": "object",
        "required": ["policy"],
        "properties": {
            "policy": TEXT,
            "against": {**TEXT, "description": "incumbent (default), base, or a policy"},
        },
        "additionalProperties": False,
    },
}

EXPERIMENT_COMPONENTS: dict[str, Schema] = {
    **JUDGING_COMPONENTS,
    "Experiment": _all_of(
        {
            "id": {"type": "integer"},
            "name": TEXT,
            "agent": TEXT,
            "status": {"type": "string", "enum": ["draft", "running", "stopped"]},
            "ramp": {"type": "integer", "description": "Percent of units that take part"},
            "allocation": {"type": "string", "enum": ["fixed", "thompson"]},
            "group": TEXT,
            "metric": TEXT,
            "goal": {"type": "string", "enum": ["higher", "lower"]},
            "arms": list_schema(
                _all_of({"name": TEXT, "policy": TEXT, "weight": NUMBER, "control": {"type": "boolean"}})
            ),
            "reason": {**TEXT, "description": "Why it was stopped"},
            "created_at": {"type": "string", "format": "date-time"},
            "started_at": MAYBE_TIME,
            "ended_at": MAYBE_TIME,
        }
    ),
    "ExperimentResults": _all_of(
        {
            "experiment": TEXT,
            "status": {"type": "string", "enum": ["draft", "running", "stopped"]},
            "metric": TEXT,
            "goal": {"type": "string", "enum": ["higher", "lower"]},
            "confidence": {
                **SHARE,
                "description": "Simultaneous confidence of the effects' intervals over all looks",
            },
            "verdict": VERDICT,
            "arms": list_schema(
                _all_of(
                    {
                        "name": TEXT,
                        "policy": TEXT,
                        "control": {"type": "boolean"},
                        "weight": NUMBER,
                        "units": COUNT,
                        "exposures": {**COUNT, "description": "Decisions"},
                        "figures": {"type": "object", "additionalProperties": INTERVAL},
                        "best": {**SHARE, "description": "Probability of being the best arm"},
                        "effect": {"anyOf": [EFFECT, {"type": "null"}]},
                        "guardrails": list_schema(GUARD),
                        "verdict": VERDICT,
                        "words": TEXT,
                    }
                )
            ),
            "mismatch": _all_of(
                {"p": MAYBE_NUMBER, "anytime_p": MAYBE_NUMBER},
                description="Test of units per arm against their weights (sample ratio mismatch): "
                "chi-square, and anytime-valid",
            ),
            "slices": list_schema(_all_of({"slice": TEXT, "value": TEXT, "arm": TEXT, "effect": EFFECT})),
            "simulated": {**COUNT, "description": "Ratings among them by simulated raters"},
            "days_needed": {**MAYBE_NUMBER, "description": "Days at the present rate"},
            "at": {"type": "string", "format": "date-time"},
        }
    ),
}
