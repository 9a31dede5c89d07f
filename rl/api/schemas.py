"""OpenAPI components of rl's REST endpoints."""

from __future__ import annotations

from backend.rest.schema import Schema, add_components, list_schema
from feedback.api.schemas import DECISION_SHOWN, SENT_ID, request_schema, with_fields
from feedback.selectors import SLUG_PATTERN
from rl.api.experiment_schemas import EXPERIMENT_COMPONENTS
from rl.api.upstreams import UPSTREAM_COMPONENTS
from rl.evaluation.scorer import MAX_RESPONSES
from rl.jobs.method_selection import RLHF
from rl.recipes.methods import METHODS
from rl.serving.chat_request import ROLES
from rl.serving.decide import MAX_CANDIDATES

NUMBER: Schema = {"type": "number"}
MAYBE_NUMBER: Schema = {"type": ["number", "null"]}
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TIME: Schema = {"type": "string", "format": "date-time"}
MAYBE_TIME: Schema = {"type": ["string", "null"], "format": "date-time"}


def _all_of(properties: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "required": list(properties),
        "properties": properties,
        "additionalProperties": False,
    }


SHARE: Schema = _all_of({"value": NUMBER, "low": NUMBER, "high": NUMBER, "n": COUNT})
"""A share with its 95 % interval."""

BASE_MODEL = {
    "type": ["string", "null"],
    "maxLength": 500,
    "description": "A folder, a hub name, a GGUF file, ollama:NAME, package:NAME, smollm2 or bundled; default: the "
    "agent's",
}
METHOD: Schema = {
    "type": ["string", "null"],
    "enum": ["auto", RLHF, *METHODS, None],
    "default": "auto",
    "description": "dpo, kto, sft, ppo, grpo, rlhf (a reward model, then PPO), or auto: chosen by the "
    "kinds of feedback",
}

RUN = {
    "id": {"type": "integer"},
    "agent": TEXT,
    "method": TEXT,
    "status": {
        "type": "string",
        "enum": ["queued", "running", "trained", "failed", "refused", "cancelled"],
    },
    "reason": {**TEXT, "description": "Why it was refused, failed or cancelled"},
    "why": {**TEXT, "description": "Reason for the method, if it was chosen automatically"},
    "stage_of": {"type": ["integer", "null"], "description": "The run that this one is a stage of"},
    "reward": {"type": ["string", "null"], "description": "Reward functions of PPO and GRPO"},
    "asked_by": {**TEXT, "description": "A person, a key, a command or `online learner`"},
    "follow_up": {
        "type": "string",
        "enum": ["", "wanted", "done", "judge", "export", "failed"],
        "description": "What follows the training: evaluate, promote, export, deploy; judge: evaluate "
        "only, a person promotes",
    },
    "phase": {
        **TEXT,
        "description": "Present phase: `loading the model`, `training, step 12 of 58`",
    },
    "phase_at": {**MAYBE_TIME, "description": "When the phase began"},
    "steps_done": COUNT,
    "steps_total": COUNT,
    "created_at": TIME,
    "started_at": MAYBE_TIME,
    "finished_at": MAYBE_TIME,
}
TRAINING_RESULT = {
    "policyId": TEXT,
    "version": TEXT,
    "modelPath": TEXT,
    "rewardModelPath": {"type": ["string", "null"], "description": "null: trained without a reward model"},
    "rewardModel": {"type": ["string", "null"], "description": "Its name in the registry of reward models"},
    "feedbackCount": COUNT,
    "trainingSteps": COUNT,
    "search": {
        "type": ["object", "null"],
        "description": "Recipes tried, with their eval figures; null without a search",
    },
    "candidates": {
        **list_schema(
            _all_of({"policy": TEXT, "share": NUMBER, "compared": COUNT, "kept": {"type": "boolean"}})
        ),
        "description": "Policies that a run of `auto` and its stages made, by the share of the eval prompts or pairs "
        "they get right; `policyId` is the one that is kept",
    },
    "rewardMean": {
        **MAYBE_NUMBER,
        "description": "Mean reward of the policy's answers to held-out prompts; null before its evaluation",
    },
    "rewardStd": {**MAYBE_NUMBER, "description": "Sample standard deviation of the same"},
    "scoreMean": {**MAYBE_NUMBER, "description": "Mean of the ratings it was trained on, in [0, 1]"},
    "scoreStd": MAYBE_NUMBER,
}

WORDS: Schema = {"type": "string", "maxLength": 1_000_000}
ANSWERING = ("assistant", "tool", "function")
CHAT: Schema = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"type": "string", "enum": list(ROLES)}, "content": WORDS},
            "additionalProperties": True,
        },
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"type": "string", "enum": list(ANSWERING)},
                "content": {
                    "anyOf": [WORDS, {"type": "null"}, {"type": "array", "items": {}, "maxItems": 0}],
                    "description": "May be null or missing: an answer may be a refusal, calls, or nothing",
                },
            },
            "additionalProperties": True,
        },
    ]
}
DECIDE_OPTIONAL: dict[str, Schema] = {
    "state": {"description": "What the agent decides about; its keys are the agent's own"},
    "messages": {
        "anyOf": [
            {"type": "string", "maxLength": 1_000_000, "description": "One turn of the user"},
            list_schema(CHAT, minItems=1),
        ],
        "description": "Chat messages instead of a state; content may also be a list of text parts",
    },
    "candidates": {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CANDIDATES,
        "uniqueItems": True,
        "description": "Responses to choose among; default: those the agent finds in the state",
        "items": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "object",
                    "required": ["response"],
                    "properties": {
                        "response": {"type": "string", "minLength": 1},
                        "score": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
                    },
                    "additionalProperties": True,
                },
            ]
        },
    },
    "unit": {
        "type": "string",
        "maxLength": 200,
        "description": "User or session that is assigned to an arm and stays there",
    },
    "run_id": {"type": "string", "maxLength": 200},
    "metadata": {"type": "object", "additionalProperties": True},
    "id": SENT_ID,
}

COMPONENTS: dict[str, Schema] = {
    "DecideSent": request_schema({"agent": {"type": "string", "pattern": SLUG_PATTERN}}, DECIDE_OPTIONAL),
    "DecisionMade": with_fields(
        DECISION_SHOWN,
        {
            "action": {
                "type": ["object", "null"],
                "description": "Parsed response; null if it is not valid for the agent",
            },
            "stored": {"type": "boolean", "description": "false: not in the database yet"},
            "recorded": {
                "type": "boolean",
                "description": "false: neither the database nor the disk could store it (`GATEWAY_WITHOUT_RECORDING`)",
            },
        },
    ),
    "PolicyVersion": _all_of(
        {
            "id": {**TEXT, "description": "The policy's name"},
            "agentId": TEXT,
            "kind": {"type": "string", "enum": ["adapter", "linear", "hosted", "recorded"]},
            "version": TEXT,
            "createdAt": TIME,
            "metrics": _all_of(
                {
                    "feedbackCount": COUNT,
                    "rewardMean": MAYBE_NUMBER,
                    "rewardStd": MAYBE_NUMBER,
                    "scoreMean": MAYBE_NUMBER,
                    "scoreStd": MAYBE_NUMBER,
                }
            ),
        }
    ),
    "TrainingSent": {
        "type": "object",
        "properties": {
            "dryRun": {"type": ["boolean", "null"], "default": False},
            "maxSteps": {"type": ["integer", "null"], "minimum": 1, "maximum": 1_000_000},
            "minutes": {
                "type": ["number", "null"],
                "minimum": 0,
                "maximum": 10_080,
                "description": "Time limit of the training and its stages, in minutes; 0 sets no limit",
            },
            "learningRate": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
            "search": {
                "type": ["integer", "null"],
                "minimum": 1,
                "maximum": 32,
                "description": "Recipes tried on the eval split (dpo, kto, sft)",
            },
            "method": METHOD,
            "baseModel": BASE_MODEL,
        },
        "additionalProperties": False,
    },
    "TrainingPlan": _all_of(
        {
            "status": {"type": "string", "enum": ["dry_run"]},
            "feedbackCount": COUNT,
            "method": {**TEXT, "description": "What would be trained"},
            "why": {**TEXT, "description": "Reason for the method"},
            "samples": {**COUNT, "description": "Training rows this feedback makes for it"},
            "pairs": {**COUNT, "description": "The same for methods that train on pairs, else 0"},
            "estimatedSteps": COUNT,
            "estimatedTimeMinutes": {"type": "number", "minimum": 0},
            "estimatedBy": TEXT,
            "estimatedMemoryGb": {
                **MAYBE_NUMBER,
                "description": "At the peak, at most; null where the base model is not on this machine",
            },
            "estimatedMemoryBy": TEXT,
            "stages": list_schema(
                _all_of(
                    {
                        "method": TEXT,
                        "samples": COUNT,
                        "estimatedSteps": COUNT,
                        "estimatedTimeMinutes": NUMBER,
                        "estimatedMemoryGb": MAYBE_NUMBER,
                    }
                )
            ),
            "rewardModel": {
                "type": ["string", "null"],
                "description": "Registered reward model it would use, if it needs one",
            },
            "scoreMean": {**MAYBE_NUMBER, "description": "Mean of the present ratings, in [0, 1]"},
            "scoreStd": MAYBE_NUMBER,
            "modelConfig": {"type": "object", "additionalProperties": True},
            "refused": {**TEXT, "description": "Why it cannot be trained now; empty if it can"},
            "doubt": {
                **TEXT,
                "description": "Warning that it would learn little or nothing; else empty",
            },
            "evidence": {
                "type": "object",
                "description": "Distance to the gate's minimum of held-out prompts: found, needed, kind, "
                "further, words",
                "additionalProperties": True,
            },
        }
    ),
    "RewardModel": _all_of(
        {
            "name": TEXT,
            "agent": TEXT,
            "stage": {"type": "string", "enum": ["candidate", "champion", "retired", "rejected"]},
            "run": {"type": ["integer", "null"]},
            "base_model": TEXT,
            "objective": {"type": "string", "enum": ["pairwise", "regression", "binary"]},
            "architecture": TEXT,
            "feedback_count": COUNT,
            "ranking": {
                "type": "object",
                "description": "Share of held-out feedback ranked as people did: value, low, high, n, what, compared",
                "additionalProperties": True,
            },
            "better_than_a_coin": {"type": "boolean"},
            "created_at": TIME,
        }
    ),
    "ScoreSent": {
        "type": "object",
        "required": ["agent", "responses"],
        "properties": {
            "agent": {"type": "string", "pattern": SLUG_PATTERN},
            "prompt": {"type": ["string", "null"], "minLength": 1, "description": "One turn of the user"},
            "messages": {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    list_schema(CHAT, minItems=1),
                    {"type": "null"},
                ],
                "description": "Chat messages instead of a prompt",
            },
            "responses": {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_RESPONSES,
                "items": {"type": "string"},
            },
            "rewardModel": {
                "type": ["string", "null"],
                "description": "A version; the agent's champion where left out",
            },
        },
        "additionalProperties": False,
    },
    "Scores": _all_of(
        {
            "agent": TEXT,
            "rewardModel": {**TEXT, "description": "Which one scored"},
            "objective": TEXT,
            "betterThanACoin": {"type": "boolean", "description": "On held-out feedback"},
            "scores": list_schema(
                _all_of(
                    {
                        "score": {**NUMBER, "description": "Any real, comparable within one reward model"},
                        "reward": {"type": "number", "minimum": -2, "maximum": 2},
                    }
                )
            ),
        }
    ),
    "Policy": _all_of(
        {
            "name": TEXT,
            "agent": TEXT,
            "stage": {
                "type": "string",
                "enum": ["candidate", "challenger", "champion", "retired", "rejected"],
            },
            "kind": {"type": "string", "enum": ["adapter", "linear", "hosted", "recorded"]},
            "title": {
                **TEXT,
                "description": "Name for sentences: of a recorded policy what its app calls it",
            },
            "base_model": {
                **TEXT,
                "description": "Empty of a linear and of a recorded policy, which have none",
            },
            "feedback_count": COUNT,
            "preference_accuracy": {
                **MAYBE_NUMBER,
                "description": "On held-out pairs, in [0, 1]; null if evaluated on other evidence",
            },
            "liked": {
                "type": ["object", "null"],
                "description": "Estimated share of its answers that people would like: value, low, high "
                "(95 %), n, estimator, assumes, against, difference, words; null if none of "
                "its answers is rated",
            },
            "known_answer": {
                "type": ["object", "null"],
                "description": "Share of held-out prompts whose known answer it gives: value, low, high, "
                "n, against, difference, words; null if no right answer is known",
            },
            "judged": {
                "type": ["object", "null"],
                "description": "Main figure of its newest evaluation: kind of evidence, title, unit, value, "
                "low, high, n, and against",
            },
            "general": {
                "type": ["object", "null"],
                "description": "Answers to general prompts, outside the agent's task: kl (nats per token to the base), "
                "plain_text and base_plain_text (shares), n, broken (examples), words; null of the bundled base model "
                "and of linear policies",
            },
            "against": {"type": ["string", "null"], "description": "Policy it was compared with"},
            "baseline": {
                "type": ["object", "null"],
                "description": "Result of a simple classifier trained on the same rows, on the same "
                "evidence: words, and headline as `judged`; null for a linear policy and "
                "for free-text answers",
            },
            "clusters": {
                "type": ["object", "null"],
                "description": "Near-identical prompts of the agent at its evaluation: prompts, clusters "
                "of two or more, clustered (prompts in them), on_two_sides, left_out (of "
                "the holdout); null if evaluated on a file",
            },
            "why": {
                "type": "object",
                "description": "Verdict against what answers today: state (ready, waits, refused, not compared, "
                "serving), words, against, basis (whose ratings these are), representative (true, false, or null), and "
                "action (kind, words, answers, minutes; null if nothing is to be done)",
            },
            "created_at": TIME,
        }
    ),
    "BenchmarkResult": _all_of(
        {
            "task": TEXT,
            "version": TEXT,
            "sha256": {**TEXT, "description": "Of the task's files; empty for a task of the hub"},
            "source": {"type": "string", "enum": ["bundled", "installed", "folder", "hub"]},
            "harness": TEXT,
            "metric": TEXT,
            "fewshot": COUNT,
            "chat_template": {"type": "boolean"},
            "limit": {"type": ["integer", "null"], "description": "First items alone; null: all"},
            "n": COUNT,
            "own": _all_of({"value": NUMBER, "stderr": NUMBER}),
            "base": _all_of({"value": NUMBER, "stderr": NUMBER}),
            "difference": {
                "type": "object",
                "description": "Policy minus base on the same items: value, low, high (95 %), p; shares in [0, 1]",
            },
            "stale": {**TEXT, "description": "Why the result is out of date; empty if it is current"},
            "seconds": NUMBER,
            "created_at": TIME,
        }
    ),
    "Verification": {
        "type": "object",
        "required": ["checked", "whole", "damaged", "missing", "unrecorded", "findings"],
        "properties": {
            **{
                name: {"type": "integer", "minimum": 0}
                for name in ("checked", "whole", "damaged", "missing", "unrecorded")
            },
            "findings": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        name: {"type": "string"}
                        for name in ("what", "kind", "path", "state", "expected", "found", "remedy")
                    },
                },
            },
        },
    },
    "PromotionSent": {
        "type": "object",
        "properties": {
            "to": {
                "type": ["string", "null"],
                "enum": ["challenger", "champion", None],
                "default": "champion",
            },
            "force": {"type": ["boolean", "null"], "default": False},
            "reason": {"type": ["string", "null"], "description": "Required with force; kept on record"},
        },
        "additionalProperties": False,
    },
    "RollbackSent": {
        "type": "object",
        "properties": {"reason": {"type": ["string", "null"]}},
        "additionalProperties": False,
    },
    "RunSent": {
        "type": "object",
        "required": ["agent"],
        "properties": {
            "agent": TEXT,
            "method": METHOD,
            "config": {"type": ["string", "null"], "description": "Preset; default: chosen by the hardware"},
            "knobs": {"type": ["object", "null"], "additionalProperties": True},
            "baseModel": BASE_MODEL,
        },
        "additionalProperties": False,
    },
    "AgentBaseSent": {
        "type": "object",
        "required": ["baseModel"],
        "properties": {"baseModel": {**BASE_MODEL, "description": "null removes the setting"}},
        "additionalProperties": False,
    },
    "AgentBaseShown": _all_of(
        {
            "agent": TEXT,
            "baseModel": {**TEXT, "description": "As `--model` takes it"},
            "path": {**TEXT, "description": "Folder or hub name; empty while it is not added yet"},
            "origin": {**TEXT, "description": "Who named it"},
            "adding": {**TEXT, "description": "What the worker that adds it does now; empty where none does"},
        }
    ),
    "SuggestionsShown": _all_of(
        {
            "agent": TEXT,
            "ratings": {**COUNT, "description": "Ratings by people that the label model learnt from"},
            "suggested": {**COUNT, "description": "Ratings it suggested"},
            "open": {**COUNT, "description": "Suggestions still open"},
            "accepted": COUNT,
            "agreed": {**COUNT, "description": "Rated the same without using the suggestion"},
            "overruled": COUNT,
            "accepted_share": {"anyOf": [SHARE, {"type": "null"}], "description": "Of those settled"},
            "right_share": {"anyOf": [SHARE, {"type": "null"}], "description": "Accepted or agreed"},
            "features": list_schema(TEXT),
            "left_out": {"type": "object", "additionalProperties": TEXT},
            "figures": {
                "type": ["object", "null"],
                "description": "accuracy, brier, calibration_error and the calibration curve on held-out ratings",
                "additionalProperties": True,
            },
        }
    ),
    "RewardsAsked": {
        "type": "object",
        "properties": {
            "agent": {"type": ["string", "null"], "description": "Of this agent alone"},
            "limit": {"type": ["integer", "null"], "minimum": 1, "maximum": 2000, "default": 2000},
        },
        "additionalProperties": False,
    },
    "RewardsCalculated": _all_of(
        {
            "calculated": {**COUNT, "description": "Decisions whose reward was calculated"},
            "written": {**COUNT, "description": "Those whose reward is new or has changed"},
            "pending": {**COUNT, "description": "Decisions that still wait"},
            "unreadable": {
                "type": "object",
                "description": "Decisions that cannot be read and were skipped, the first of them, and why",
                "additionalProperties": TEXT,
            },
            "unreadable_count": {**COUNT, "description": "How many were skipped: /problems/ lists them"},
            "refused": {
                "type": "object",
                "description": "Agents whose rewards cannot be calculated as they are set, and why",
                "additionalProperties": TEXT,
            },
        }
    ),
    "OnlineStatus": _all_of(
        {
            "agent": TEXT,
            "enabled": {"type": "boolean"},
            "buffer_size": {
                **COUNT,
                "description": "Ratings, comparisons, outcomes and traces that no policy was trained on",
            },
            "new_samples": {**COUNT, "description": "Those that no retraining has read"},
            "min_samples": COUNT,
            "max_buffer_size": COUNT,
            "should_retrain": {"type": "boolean"},
            "reason": TEXT,
            "method": TEXT,
            "gate": TEXT,
            "champion": {"type": ["string", "null"]},
            "evidence": {
                "type": ["object", "null"],
                "description": "Distance to the gate's minimum of held-out prompts; null with very much "
                "feedback",
                "properties": {
                    "found": {**COUNT, "description": "Held-out prompts with evidence"},
                    "needed": COUNT,
                    "kind": {**TEXT, "description": "Kind of evidence that carries the accuracy rule"},
                    "further": {**COUNT, "description": "Rated prompts still needed, about"},
                    "words": TEXT,
                },
            },
            "last_run": {
                "type": ["object", "null"],
                "properties": {
                    "id": {"type": "integer"},
                    "status": TEXT,
                    "reason": TEXT,
                    "created_at": MAYBE_TIME,
                    "finished_at": MAYBE_TIME,
                    "policy": {"type": ["string", "null"]},
                    "stage": {"type": ["string", "null"]},
                },
            },
            "next_check": MAYBE_TIME,
        }
    ),
    "Run": {**_all_of(RUN), "additionalProperties": False},
    "RunWhole": {
        "type": "object",
        "required": [*RUN, "stages", "history"],
        "properties": {
            **RUN,
            "stages": {
                **list_schema(
                    _all_of(
                        {
                            "run": COUNT,
                            "method": TEXT,
                            "status": TEXT,
                            "reason": TEXT,
                            "steps_done": COUNT,
                            "steps_total": COUNT,
                            "made": {**TEXT, "description": "The policy or reward model it made"},
                            "why": TEXT,
                        }
                    )
                ),
                "description": "Stages trained first: the answer format, a reward model",
            },
            **TRAINING_RESULT,
            "history": {
                "type": "object",
                "description": "Figure -> its [step, value] points so far",
                "additionalProperties": list_schema({"type": "array", "items": NUMBER}),
            },
        },
        "additionalProperties": False,
    },
}

hook = add_components({**COMPONENTS, **EXPERIMENT_COMPONENTS, **UPSTREAM_COMPONENTS})
