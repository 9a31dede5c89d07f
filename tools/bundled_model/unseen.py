"""Strangers' agents the bundled base is measured on: none of their keys, options or instructions is ever taught. Pure.

Each is what an app would define: a system prompt, a template and a JSON schema. They differ in language, script, layout
and kind of answer; options and fields are drawn anew for each prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from rl.agents.template import TemplateAgent

ENUM, LIST, ORDER, OBJECT = "enum", "list", "order", "object"


@dataclass(frozen=True)
class Unseen:
    """A stranger's agent: how it asks, and what may be answered."""

    slug: str
    kind: str
    key: str
    pool: tuple[str, ...]
    """Options that prompts take theirs from."""
    system: str
    template: str
    """{options} stands for the options as `joint` writes them, {field} for words that matter to nobody."""
    joint: str = "\n"
    """Between two options; `json`: a JSON list."""
    fields: tuple[str, ...] = ("overcast", "drizzle", "sleepy", "noisy", "vegan", "hasty", "grumpy", "tidy")
    fixed: bool = False
    """Every option is listed each time, in the same order."""
    properties: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Further keys of an OBJECT, each with its schema."""

    def prompt(self, random: Random) -> tuple[TemplateAgent, dict[str, Any], list[str]]:
        """The agent of one prompt, the state it renders, and the options of an ENUM's answers."""
        count = len(self.pool) if self.fixed else random.randint(3, min(5, len(self.pool)))
        options = list(self.pool) if self.fixed else random.sample(self.pool, count)
        state = {"options": _answer_text(options, self.joint)}
        state |= {name: random.choice(self.fields) for name in ("field", "other")}
        agent = TemplateAgent(
            slug=self.slug,
            title=self.slug,
            description="",
            system_prompt=self.system,
            template=self.template,
            schema=self._schema(options),
            max_new_tokens=96,
        )
        return agent, state, options

    def _schema(self, options: Sequence[str]) -> dict[str, Any]:
        names: dict[str, Any] = {"enum": list(options)}
        if self.kind == LIST:
            names = {"type": "array", "items": names, "uniqueItems": True, "minItems": 1}
        elif self.kind == ORDER:
            names = {
                "type": "array",
                "items": names,
                "uniqueItems": True,
                "minItems": len(options),
                "maxItems": len(options),
            }
        properties = {self.key: names, **dict(self.properties)}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }


def _answer_text(options: Sequence[str], joint: str) -> str:
    return json.dumps(list(options), ensure_ascii=False) if joint == "json" else joint.join(options)


UNSEEN: tuple[Unseen, ...] = (
    Unseen(
        "barista", ENUM, "drink", ("espresso", "cappuccino", "cocoa", "lemonade", "smoothie", "oolong"),
        "Pick one listed drink for the guest. Answer in JSON.", "sky: {field}\nguest: {other}\ndrinks:\n{options}",
    ),
    Unseen(
        "escalation", ENUM, "severity", ("negligible", "moderate", "critical"),
        'How severe is the incident? Answer in JSON with the key "severity": negligible, moderate or critical.',
        "incident: the {field} freezer tripped\nreported: {other}", fixed=True,
    ),
    Unseen(
        "dock", ENUM, "bay", ("north ramp", "south ramp", "cold dock", "gravel yard", "tent B"),
        'Choose one of the options. Reply like {"bay": "..."}',
        "truck: {field}\ndriver: {other}\noptions:\n- {options}",
        joint="\n- ",
    ),
    Unseen(
        "клиника", ENUM, "врач", ("хирург", "окулист", "терапевт", "логопед", "педиатр"),
        'Pick one option. Answer in JSON with the key "врач".',
        "жалоба: {field}, {other}\noptions: {options}", joint=", ",
    ),
    Unseen(
        "部署", ENUM, "部署", ("経理部", "営業部", "総務部", "開発部", "法務部"),
        'Answer in JSON with the key "部署".', "件名: {field}\n部署: {options}", joint=", ",
    ),
    Unseen(
        "lager", ENUM, "regal", ("Schrauben-Nord", "Farbeimer", "Holzlatten", "Lampenfassung", "Kabelkanal"),
        "Wähle ein Regal für die Lieferung. Antworte in JSON.", "Lieferung: {field}\nTempo: {other}\nregal:\n{options}",
    ),
    Unseen(
        "codes", ENUM, "zx_k", ("qvxj-7", "wub_19", "HHJ3", "kk.zp", "5t5t", "Oqo-Wm"),
        "Select one zx_k. JSON only.", '{"crate": "{field}", "zx_k": {options}}', joint="json",
    ),
    Unseen(
        "hashtags", LIST, "hashtags", ("sunset", "beach", "selfie", "latte", "puppy", "vintage"),
        'Pick the hashtags that fit the photo. Answer in JSON with a list under "hashtags".',
        "photo: a {field} pier, {other}\nhashtags:\n{options}",
    ),
    Unseen(
        "etiquetas", LIST, "etiquetas", ("cocina", "jardín", "garaje", "baño", "pasillo"),
        'Choose one or more of the options. Answer in JSON like {"etiquetas": ["..."]}',
        "nota: {field}\noptions: {options}",
        joint=", ",
    ),
    Unseen(
        "playlist", ORDER, "playlist", ("Blue Monk", "Giant Steps", "So What", "Freddie", "Naima"),
        'Rank the listed songs, best first. Answer in JSON with a list under "playlist".',
        "crowd: {field}\nsongs:\n{options}",
    ),
    Unseen(
        "chores", ORDER, "chores", ("sweep", "dust", "mop", "iron", "rake"),
        'Put all listed chores in order. Reply with JSON, key "chores".',
        "flat: {field}\nchores: {options}", joint=", ",
    ),
    Unseen(
        "feedback", OBJECT, "sentiment", ("delighted", "lukewarm", "furious"),
        "Rate the review. JSON:\nsentiment: delighted, lukewarm or furious\nstars: 1 to 5\nescalate: true or false",
        "review: {field} and {other}", fixed=True,
        properties=(("stars", {"type": "integer", "minimum": 1, "maximum": 5}), ("escalate", {"type": "boolean"})),
    ),
    Unseen(
        "nurse", ENUM, "triage", ("crimson", "amber", "lime"),
        'You are a triage bot. Return JSON: {"triage": "crimson" | "amber" | "lime"}',
        "Patient is {field}. Complaint: {other}.", fixed=True,
    ),
    Unseen(
        "parcels", ENUM, "lane", ("express", "bulky", "fragile", "overnight", "pickup"),
        'Decide which lane this parcel takes. Respond only with JSON, for example {"lane": "standby"}',
        "Parcel: {field}, {other}\nAvailable lanes:\n* {options}", joint="\n* ",
    ),
    Unseen(
        "sommelier", ENUM, "vin", ("Muscadet", "Chinon", "Gigondas", "Sancerre"),
        'Choisissez un vin pour ce plat. Répondez en JSON avec la clé "vin".',
        "plat : {field}\nvins :\n- {options}", joint="\n- ",
    ),
    Unseen(
        "χρώματα", ENUM, "χρώμα", ("κόκκινο", "μπλε", "κίτρινο", "μωβ"),
        'Διάλεξε ένα χρώμα. JSON: {"χρώμα": "..."}', "τοίχος: {field}\nχρώματα: {options}", joint=", ",
    ),
    Unseen(
        "kitchen", LIST, "allergens", ("gluten", "lupin", "sesame", "mustard", "celery"),
        'Return the allergens of the dish as JSON: {"allergens": [...]}',
        "Dish: {field} pie with {other}\nKnown allergens: {options}", joint=", ",
    ),
    Unseen(
        "courier", ORDER, "itinerary", ("depot", "harbour", "mall", "clinic", "airport"),
        'Sort these stops into a sensible itinerary. Return {"itinerary": [...]} with every stop once.',
        "van: {field}\nstops: {options}", joint=", ",
    ),
    Unseen(
        "hotel", OBJECT, "chamber", ("attic", "cellar", "suite"),
        "Extract the booking as JSON.\nchamber: attic, cellar or suite\nnights: 1-14\nbreakfast: true/false",
        "Guest says: {field}, {other}, see you soon", fixed=True,
        properties=(("nights", {"type": "integer", "minimum": 1, "maximum": 14}), ("breakfast", {"type": "boolean"})),
    ),
    Unseen(
        "films", OBJECT, "genre", ("noir", "romcom", "western"),
        'Answer in this form: {"genre": noir/romcom/western, "tension": 0-10}',
        "plot: a {field} sheriff, {other}", fixed=True,
        properties=(("tension", {"type": "integer", "minimum": 0, "maximum": 10}),),
    ),
)  # fmt: skip
"""Twelve agents and eight written once the curriculum was fixed (`nurse` and those after it); a test holds that none
of their names is among the words taught."""

BLIND: tuple[Unseen, ...] = (
    Unseen(
        "ticket-weiterleitung", ENUM, "abteilung",
        ("Buchhaltung", "Technik", "Versand", "Vertrieb", "Reklamation", "Personal"),
        'Du leitest Kundenanfragen an die passende Abteilung weiter. Antworte nur mit JSON: {"abteilung": "..."}',
        "Betreff: {field}\nKunde: {other}\nAbteilungen: {options}", joint=", ",
        fields=("Rückfrage", "Neukunde", "Passwort", "verärgert", "Rabatt", "Stammkunde"),
    ),
    Unseen(
        "returns-desk", ENUM, "return_reason",
        ("wrong size", "damaged box", "late arrival", "missing part", "changed mind", "poor quality"),
        'Classify why the customer is sending the item back. Output a JSON object with one field, "return_reason".',
        "Item: {field}\nCustomer note: {other}\n\nPossible reasons:\n- {options}", joint="\n- ",
        fields=("sneakers", "kettle", "backpack", "headphones", "curtain", "toaster"),
    ),
    Unseen(
        "pr-reviewer", ENUM, "verdict", ("approve", "comment", "reject"),
        "You are a senior engineer reviewing pull requests. Decide whether to approve, comment or reject, "
        'and return your decision as JSON under the key "verdict".',
        "PR title: {field}\nBranch: {other}", fixed=True,
        fields=("fix login redirect", "bump eslint", "add retry logic", "rename helpers", "cache avatars"),
    ),
    Unseen(
        "goblin-ai", ENUM, "action", ("attack", "flee", "hide", "heal", "bargain", "taunt"),
        "You control an enemy in a turn-based RPG. Choose exactly one of the allowed actions and reply with JSON, "
        'e.g. {"action": "wait"}.',
        '{"weather": "{field}", "player_class": "{other}", "allowed_actions": {options}}', joint="json",
        fields=("foggy", "wizard", "archer", "stormy", "paladin", "moonlit"),
    ),
    Unseen(
        "newsroom", ENUM, "section", ("politics", "sports", "culture", "business", "science", "travel"),
        "Assign the article to one newspaper section. Respond in JSON.",
        "headline: {field}\nbyline: {other}\nsection:\n* {options}", joint="\n* ",
        fields=("Bridge reopens", "Marta Lind", "Storm ahead", "Jon Petrov", "Museum strike", "A. Okafor"),
    ),
    Unseen(
        "intake-form", LIST, "symptoms", ("fever", "cough", "rash", "nausea", "headache", "dizziness"),
        "You help a clinic fill in its intake form. List the symptoms that apply as JSON: "
        '{"symptoms": ["...", "..."]}. Use only symptoms from the list.',
        "Visit type: {field}\nPatient says: {other}\nSymptom list: {options}", joint=", ",
        fields=("walk-in", "follow-up", "I slept badly", "since Monday", "phone call", "after lunch"),
    ),
    Unseen(
        "issue-labeler", LIST, "labels", ("bug", "docs", "refactor", "security", "performance", "tests"),
        'Label the GitHub issue with one or more of the available labels. Return JSON with an array named "labels".',
        "Title: {field}\nReporter: {other}\nAvailable labels: {options}", joint="json",
        fields=("crash on startup", "octofan", "typo in README", "devjane", "slow queries", "mk-42"),
    ),
    Unseen(
        "garden-planner", LIST, "plants", ("basil", "marigold", "chives", "radish", "fennel", "thyme"),
        "Suggest which plants to put into the raised bed. Answer in JSON.",
        "Soil: {field}\nLight: {other}\n\nplants:\n{options}",
        fields=("sandy", "clay", "half shade", "full sun", "loamy", "windy"),
    ),
    Unseen(
        "timetable", ORDER, "schedule", ("algebra", "biology", "history", "drama", "music", "geography"),
        "Arrange the lessons for one school day, using every lesson exactly once. "
        'Return JSON in the form {"schedule": ["first", "second", ...]}.',
        "Class: {field}\nTeacher: {other}\nLessons: {options}", joint=", ",
        fields=("7b", "Ms. Hart", "9a", "Mr. Boone", "5c", "Mrs. Ito"),
    ),
    Unseen(
        "support-queue", ORDER, "priority_order",
        ("login outage", "invoice typo", "refund request", "broken link", "data export"),
        "Sort all open tickets from most urgent to least urgent. "
        'Reply with JSON only and put the sorted list under "priority_order".',
        "Shift: {field}\nOpen tickets:\n- {options}", joint="\n- ",
        fields=("morning", "night", "weekend", "holiday", "evening"),
    ),
    Unseen(
        "mail-triage", OBJECT, "category", ("billing", "technical", "account"),
        "Read the customer email and return JSON with these keys:\n"
        '- "category": one of billing, technical, account\n'
        '- "urgent": true or false\n'
        '- "priority": a number from 1 to 4',
        "Email: {field}\nSent from: {other}", fixed=True,
        properties=(("urgent", {"type": "boolean"}), ("priority", {"type": "integer", "minimum": 1, "maximum": 4})),
        fields=("please call me back", "Lisbon", "I cannot sign in", "Oslo", "where is my receipt", "mobile app"),
    ),
    Unseen(
        "stock-check", OBJECT, "status", ("in_stock", "low", "sold_out"),
        "Turn the warehouse note into a stock record. "
        'Respond with JSON like {"status": "in_stock|low|sold_out", "quantity": 0-99}.',
        "SKU: {field}\nNote: {other}", fixed=True,
        properties=(("quantity", {"type": "integer", "minimum": 0, "maximum": 99}),),
        fields=("mug-blue", "shelf half empty", "lamp-04", "pallet just came in", "rug-xl", "counted twice"),
    ),
)  # fmt: skip
"""Twelve agents by somebody who knew nothing of the curriculum, as apps would define them. Everyday words among their
names are taught."""
