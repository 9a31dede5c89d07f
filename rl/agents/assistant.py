"""Agent `assistant`: free text. The default behaviour of any slug that has no file of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from rl.agents.base import (
    Agent,
    InvalidResponse,
    JsonObject,
    Message,
    Scenario,
    State,
    World,
)

# Topic -> (how customers ask, the fact every direct answer names, the rest of the answer around it).
TOPICS: dict[str, tuple[tuple[str, str, str], str, str]] = {
    "password": (
        ("How do I reset my password?", "I forgot my password.", "Can I change my {product} password?"),
        "Security",
        "Open Settings, then {fact}, and choose a new password.",
    ),
    "invoice": (
        ("Where is my invoice?", "I need a copy of the {product} bill.", "Can you send me the last invoice?"),
        "Billing",
        "You find every invoice under {fact} in your account.",
    ),
    "cancel": (
        ("How do I cancel {product}?", "I want to end my plan.", "Can I stop the {product} subscription?"),
        "Plans",
        "Open {fact} in your account and choose cancel.",
    ),
    "refund": (
        ("Can I get my money back?", "How long does a {product} refund take?", "I was charged twice."),
        "five days",
        "The money is back on your card within {fact}.",
    ),
    "delivery": (
        ("When will my {product} arrive?", "My parcel is late.", "Where is my {product} order?"),
        "tracking link",
        "The {fact} in your mail shows where the parcel is.",
    ),
    "address": (
        ("How do I change my address?", "I moved to a new house.", "My {product} delivery address is wrong."),
        "Profile",
        "Open {fact} and enter the new address there.",
    ),
    "export": (
        (
            "Can I export my {product} data?",
            "How do I download my data?",
            "I need my {product} data as a file.",
        ),
        "Export",
        "Choose {fact} in the menu and the file is sent to you.",
    ),
    "hours": (
        ("When are you open?", "Can I call you today?", "What are the {product} support hours?"),
        "nine to five",
        "We answer calls from {fact} on every working day.",
    ),
    "invite": (
        (
            "How do I add a colleague?",
            "Can two people use {product}?",
            "I want to invite my team to {product}.",
        ),
        "Members",
        "Open {fact} and enter the mail address of your colleague.",
    ),
    "slow": (
        ("{product} is very slow.", "Why does {product} take so long?", "The {product} page does not load."),
        "restart",
        "A {fact} of the app helps in most cases.",
    ),
}
PRODUCTS = ("Lumen", "Harbor", "Pocket", "Atlas", "Clover", "Beacon")
FRIENDLY = ("Happy to help!", "Thanks for asking!", "Sure, gladly!")
PLAIN = ("Here is how it works.", "This is the answer.", "Read this.")
DIRECT = ("It is easy: {answer}", "Do it this way: {answer}", "In short: {answer}")
EVASIVE = (
    "That depends on many things, so it is hard to say.",
    "Please look around in the app until you find it.",
    "Such questions are answered somewhere on our pages.",
)
BRIEF_WORDS = 24
FRIENDLY_TONE, PLAIN_TONE = "friendly", "plain"


@dataclass(frozen=True)
class Assistant(Agent):
    """Answers in free text.

    State, the first key found: "messages": a chat, used as it is; "question", "prompt" or "input": text; without any of
    them the prompt is the whole state as JSON. Never shown: "drafts", answers to choose from in a simulation; "facts",
    texts of which a direct answer names one. Response: any text that is not blank.
    """

    def render(self, state: State) -> list[Message]:
        if "messages" in state:
            return _messages(self.slug, state["messages"])
        for key in ("question", "prompt", "input"):
            if isinstance(state.get(key), str) and state[key].strip():
                question = state[key]
                break
        else:
            shown = {
                key: value for key, value in state.items() if key not in ("drafts", "facts", "wanted", "lead")
            }
            if not shown:
                raise ValueError(
                    f"{self.slug}: the state needs 'messages', a 'question' or at least one other key"
                )
            question = json.dumps(shown, ensure_ascii=False)
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": question}]

    def parse(self, response: str, state: State | None = None) -> JsonObject:
        if not response.strip():
            raise InvalidResponse("expected an answer in words, found nothing but blanks")
        return {"text": response.strip()}

    def candidates(self, state: State) -> list[str]:
        return list(state.get("drafts") or ())

    def scenarios(self) -> list[Scenario]:
        random = Random("assistant")
        made = []
        for topic, (sayings, _, _) in TOPICS.items():
            questions = sorted({saying.format(product=product) for saying in sayings for product in PRODUCTS})
            for number, question in enumerate(questions, start=1):
                state = state_random(random, topic, question)
                made.append(Scenario(f"{topic}-{number:03d}", state, tags=(topic,)))
        return made

    def hidden_preference(self, state: State, response: str) -> float:
        """Sum of 0.6 for a direct answer (it names one of the state's facts), 0.3 for a friendly, 0.1 for a brief one.

        If the state has a "wanted" tone, that tone counts 0.6 and directness 0.3. Without facts any answer that is not
        evasive counts as direct. A blank answer is 0.
        """
        if not self.is_valid(response):
            return 0.0
        text, facts = response.casefold(), state.get("facts") or ()
        direct = (
            any(str(fact).casefold() in text for fact in facts)
            if facts
            else not any(evasive.casefold() in text for evasive in EVASIVE)
        )
        friendly = any(phrase.casefold() in text for phrase in FRIENDLY)
        brief = len(response.split()) <= BRIEF_WORDS
        if "wanted" in state:
            return round(
                0.3 * direct + 0.6 * (friendly == (state["wanted"] == FRIENDLY_TONE)) + 0.1 * brief, 2
            )
        return round(0.6 * direct + 0.3 * friendly + 0.1 * brief, 2)


def state_random(random: Random, topic: str, question: str | None = None) -> JsonObject:
    """A made-up question with four drafts of about one length: two direct, two evasive, each friendly or plain."""
    sayings, fact, answer = TOPICS[topic]
    # as many direct as evasive wordings, so that neither kind is likelier by having fewer
    direct = [phrase.format(answer=answer.format(fact=fact)) for phrase in DIRECT]
    drafts = [
        f"{random.choice(FRIENDLY)} {random.choice(direct)}",
        f"{random.choice(PLAIN)} {random.choice(direct)}",
        f"{random.choice(FRIENDLY)} {random.choice(EVASIVE)}",
        f"{random.choice(PLAIN)} {random.choice(EVASIVE)}",
    ]
    random.shuffle(drafts)
    if question is None:
        question = random.choice(sayings).format(product=random.choice(PRODUCTS))
    return {"question": question, "facts": [fact], "drafts": drafts}


def _messages(slug: str, messages: Any) -> list[Message]:
    good = isinstance(messages, (list, tuple)) and messages
    if not good or not all(
        isinstance(turn, Mapping)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in messages
    ):
        raise ValueError(
            f"{slug}: 'messages' must be a list of {{'role', 'content'}} texts with at least one turn; "
            f"found {messages!r:.120}"
        )
    return [{"role": turn["role"], "content": turn["content"]} for turn in messages]


LEADS = {
    "I am in a hurry: ": PLAIN_TONE,
    "On my way out, ": PLAIN_TONE,
    "For the minutes: ": PLAIN_TONE,
    "I am new here: ": FRIENDLY_TONE,
    "A bit lost, ": FRIENDLY_TONE,
    "Sorry to ask again: ": FRIENDLY_TONE,
}
"""Beginning of a question -> the tone its asker wants."""


def _draw_state(agent: Agent, random: Random) -> JsonObject:
    state = state_random(random, random.choice(tuple(TOPICS)))
    lead, case = random.choice(tuple(LEADS)), random.randint(100, 999)
    return state | {"question": f"{lead}{state['question']} (case {case})", "lead": lead}


def _situation_answer(state: JsonObject) -> None:
    state["wanted"] = LEADS[state["lead"]]


AGENT = Assistant(
    slug="assistant",
    title="Assistant",
    description="Answers in free text; what every agent does that has no file of its own.",
    system_prompt="You are a helpful assistant. Answer briefly.",
    suggested_tags=("wrong", "too long", "unfriendly", "beside the point"),
    max_new_tokens=96,
    world=World(_draw_state, _situation_answer),
)
