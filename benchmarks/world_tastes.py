"""Made-up worlds to learn in: prompts of several features, options, a hidden taste, and feedback in four shapes. Pure.

Six worlds are there to tune recipes over (`TUNED`), six others are kept aside to report on (`KEPT`); no recipe was
chosen by looking at the latter. Each has its own agent name, options, language, form of prompt and share of verdicts
that are flipped. A taste is linear in the features, with interactions of two features and vetoes on top.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

THUMBS, PAIRS, CORRECTIONS, SCORES = "thumbs", "pairs", "corrections", "scores"


Phrases = Callable[[Sequence[str]], list[str]]


def rated_phrases(phrases: Sequence[str]) -> list[str]:
    """Phrases of a value but the last, where it has several."""
    return list(phrases[:-1] or phrases)


def new_phrases(phrases: Sequence[str]) -> list[str]:
    """The last phrase of a value."""
    return list(phrases[-1:])


@dataclass(frozen=True)
class Prompt:
    """A prompt and the values of its features."""

    text: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """A task with a hidden taste. Feature value -> how a prompt says it (one of several phrases)."""

    agent: str
    kind: str
    options: tuple[str, ...]
    features: Mapping[str, Mapping[str, Sequence[str]]]
    form: str
    """`lines` (`feature: value`), `json`, or `text`, where phrases follow each other in a random order."""
    opening: str = ""
    noise: float = 0.1
    """Share of verdicts that are flipped, of corrections that name another option; standard deviation of scores."""
    interactions: int = 4
    vetoes: int = 2
    linear: float = 1.0
    """Standard deviation of the linear part's weights; an interaction adds 4, a veto takes 8."""
    seed: int = 0

    @functools.cached_property
    def _taste(self) -> _Taste:
        random = Random(f"{self.agent}/{self.seed}")
        names = list(self.features)
        weights = {
            (name, value, option): random.gauss(0, self.linear)
            for name, values in self.features.items()
            for value in values
            for option in range(len(self.options))
        }
        crossed = {}
        for _ in range(self.interactions):
            two = random.sample(range(len(names)), 2)
            picked = tuple((place, random.choice(list(self.features[names[place]]))) for place in two)
            crossed[picked] = random.randrange(len(self.options))
        vetoes = set()
        for _ in range(self.vetoes):
            place = random.randrange(len(names))
            value = random.choice(list(self.features[names[place]]))
            vetoes.add((place, value, random.randrange(len(self.options))))
        return _Taste(weights, crossed, vetoes)

    def utilities(self, prompt: Prompt) -> list[float]:
        """What each option is worth to people here."""
        taste = self._taste
        worth = []
        for option in range(len(self.options)):
            total = sum(
                taste.weights[name, value, option]
                for name, value in zip(self.features, prompt.values, strict=True)
            )
            for two, favourite in taste.crossed.items():
                if favourite == option and all(prompt.values[place] == value for place, value in two):
                    total += 4
            total -= 8 * sum(
                (place, value, option) in taste.vetoes for place, value in enumerate(prompt.values)
            )
            worth.append(total)
        return worth

    def liked(self, prompt: Prompt) -> set[int]:
        """The options people like here: the best, and what is nearly as good, a quarter of all at most."""
        worth = self.utilities(prompt)
        most = max(1, len(worth) // 4)
        best = sorted(range(len(worth)), key=lambda option: -worth[option])[:most]
        return {option for option in best if worth[option] >= worth[best[0]] - 1.5}

    def prompts(
        self, count: int, seed: int, without: Sequence[Prompt] = (), phrases: Phrases = list
    ) -> list[Prompt]:
        """So many prompts with different texts, none of them in `without`; `phrases` picks those a value is said by."""
        random = Random(f"{self.agent}/{seed}")
        texts = {prompt.text for prompt in without}
        drawn: list[Prompt] = []
        for _ in range(100 * count):
            values = tuple(random.choice(list(values)) for values in self.features.values())
            text = self._text(values, random, phrases)
            if text not in texts:
                texts.add(text)
                drawn.append(Prompt(text, values))
            if len(drawn) == count:
                return drawn
        raise ValueError(f"{self.agent} has no {count} different prompts")

    def _text(self, values: Sequence[str], random: Random, phrases: Phrases) -> str:
        said = {
            name: random.choice(phrases(self.features[name][value]))
            for name, value in zip(self.features, values, strict=True)
        }
        number = random.randrange(1000, 10_000)
        if self.form == "json":
            return json.dumps({**said, "id": number}, ensure_ascii=False)
        if self.form == "lines":
            lines = "\n".join(f"{name}: {phrase}" for name, phrase in said.items())
            return f"{self.opening} #{number}\n{lines}"
        sentences = list(said.values())
        random.shuffle(sentences)
        return " ".join([f"{self.opening} {number}.", *sentences])

    # --- Feedback -------------------------------------------------------------------------------------------

    def feedback(self, prompts: Sequence[Prompt], seed: int) -> list[dict[str, Any]]:
        """A row for each prompt, as `import_feedback` reads it: the shown response is drawn evenly."""
        random = Random(f"{self.agent}/feedback/{seed}")
        make = {PAIRS: self.pair, THUMBS: self.thumb, CORRECTIONS: self._correction, SCORES: self._score}
        return [{"prompt": prompt.text, **make[self.kind](prompt, random)} for prompt in prompts]

    def pair(self, prompt: Prompt, random: Random) -> dict[str, Any]:
        """A preference between two options drawn by lot, as a row of feedback without its prompt."""
        worth = self.utilities(prompt)
        two = sorted(random.sample(range(len(worth)), 2), key=lambda option: -worth[option])
        if random.random() < self.noise:
            two.reverse()
        return {"chosen": self.options[two[0]], "rejected": self.options[two[1]]}

    def _shown(self, prompt: Prompt, random: Random) -> tuple[int, bool]:
        """What was shown, three times in ten something liked, and whether it is."""
        liked = self.liked(prompt)
        option = (
            random.choice(sorted(liked)) if random.random() < 0.3 else random.randrange(len(self.options))
        )
        return option, option in liked

    def thumb(self, prompt: Prompt, random: Random) -> dict[str, Any]:
        """A thumb on one option, as a row of feedback without its prompt."""
        option, good = self._shown(prompt, random)
        up = good != (random.random() < self.noise)
        return {"response": self.options[option], "thumb": "up" if up else "down", "rater": "ana"}

    def _correction(self, prompt: Prompt, random: Random) -> dict[str, Any]:
        worth = self.utilities(prompt)
        right = max(range(len(worth)), key=worth.__getitem__)
        if random.random() < self.noise:
            right = random.randrange(len(worth))
        shown = random.choice([option for option in range(len(worth)) if option != right])
        return {"response": self.options[shown], "correction": self.options[right]}

    def _score(self, prompt: Prompt, random: Random) -> dict[str, Any]:
        option, _ = self._shown(prompt, random)
        worth = self.utilities(prompt)
        below = (max(worth) - worth[option]) / 4
        return {
            "response": self.options[option],
            "score": round(min(max(0.95 - 0.6 * min(below, 1.5) + random.gauss(0, self.noise), 0.0), 1.0), 2),
            "rater": "ana",
        }


@dataclass(frozen=True)
class _Taste:
    weights: Mapping[tuple[str, str, int], float]
    crossed: Mapping[tuple[tuple[int, str], ...], int]
    vetoes: set[tuple[int, str, int]]


def _plain(**features: str) -> dict[str, dict[str, list[str]]]:
    """Features whose values are said by their own name."""
    return {name: {value: [value] for value in values.split()} for name, values in features.items()}


def _words(text: str) -> list[str]:
    return text.split()


def _keyed(key: str, *options: str) -> tuple[str, ...]:
    return tuple(json.dumps({key: option}, ensure_ascii=False) for option in options)


TUNED: tuple[World, ...] = (
    World(
        "barista", PAIRS, _keyed("drink", *_words("espresso cappuccino tea cocoa water juice smoothie milk")),
        _plain(
            weather="hot cold rainy", guest="child adult elder", hour="morning noon evening late",
            mood="tired lively calm", budget="low high", season="winter summer autumn spring",
        ),
        "lines", "Guest", noise=0.1,
    ),
    World(
        "triage", THUMBS, ("Ask for a photo.", "Send a nurse.", "Book a visit this week.", "Call an ambulance.",
                           "Advise rest and water.", "Renew the prescription."),
        {
            "trouble": {
                "fever": ("I have a fever.", "My temperature is high."), "rash": ("My skin is red.", "I have a rash."),
                "pills": ("I ran out of pills.", "My tablets are finished."), "pain": ("My chest hurts.", "It hurts."),
                "cough": ("I cough a lot.", "The cough is back."),
            },
            "since": {"today": ("Since today.", "It began today."), "week": ("For a week now.", "Since last week.")},
            "age": {"young": ("I am 23.", "I am a student."), "old": ("I am 81.", "I am retired.")},
            "tone": {"calm": ("Thank you.", "Kind regards."), "afraid": ("I am afraid!", "Please help!")},
        },
        "text", "Patient", noise=0.1,
    ),
    World(
        "regal", CORRECTIONS, tuple(f"Regal {letter}{number}" for letter in "ABCDE" for number in range(1, 7)),
        _plain(
            ware="Schrauben Farbe Holz Lampen Kabel Werkzeug", masse="klein mittel gross", gefahr="nein ja",
            tempo="langsam schnell",
        ),
        "lines", "Lieferung", noise=0.1, interactions=3,
    ),
    World(
        "signal", THUMBS, _keyed("action", "hold", "slow", "stop"),
        _plain(track="one two three four", load="empty half full", wind="none mild strong", light="day night"),
        "json", noise=0.3, interactions=5,
    ),
    World(
        "menu-cantine", SCORES, ("Soupe", "Salade", "Poisson", "Poulet", "Pizza", "Riz", "Gratin", "Tarte", "Omelette",
                                 "Curry", "Crêpe", "Ragoût"),
        _plain(jour="lundi mardi mercredi jeudi vendredi", saison="hiver printemps ete automne",
               public="enfants adultes", stock="bas moyen haut"),
        "lines", "Repas", noise=0.1,
    ),
    World(
        "router", PAIRS, tuple(f"queue-{name}" for name in _words("alpha beta gamma delta omega")),
        _plain(kind="mail chat call form", topic="bill bug sale press legal", tier="free gold", lang="en de fr jp"),
        "json", noise=0.2, interactions=6, linear=0.5,
    ),
)  # fmt: skip
"""Worlds that recipes are chosen on."""

KEPT: tuple[World, ...] = (
    World(
        "gardener", PAIRS, _keyed("step", *_words("water prune feed repot mulch wait move spray")),
        _plain(
            plant="rose fern cactus basil ivy tulip", soil="dry moist wet", light="shade sun half",
            leaf="green yellow spotted", month="march june october", pot="small large",
        ),
        "json", noise=0.1,
    ),
    World(
        "hotel-desk", THUMBS, ("We move you to a quiet room.", "A towel is on its way.", "Breakfast is on us.",
                               "The manager will come to you.", "Here is a map of the city.", "We call a taxi."),
        {
            "wish": {
                "noise": ("The street is so loud.", "I cannot sleep here.", "My neighbours shout."),
                "towel": ("The bath is missing a towel.", "No towels again."),
                "way": ("How do I get to the museum?", "Where is the old town?"),
                "ride": ("I must be at the airport at six.", "My train leaves soon."),
                "food": ("The breakfast was cold.", "My coffee never came."),
            },
            "tone": {"angry": ("This is a shame!", "I am angry!"), "kind": ("Thank you.", "No hurry.")},
            "guest": {"regular": ("I come every year.", "As always, room 12."), "new": ("It is my first time here.",)},
            "stay": {"short": ("I leave tomorrow.",), "long": ("I stay for two weeks.", "I am here all month.")},
        },
        "text", "Room", noise=0.2,
    ),
    World(
        "estante", CORRECTIONS, tuple(f"Pasillo {number}" for number in range(1, 21)),
        _plain(producto="leche pan queso fruta carne jabon vino", tamano="chico grande", frio="si no",
               oferta="si no", turno="manana tarde noche"),
        "lines", "Pedido", noise=0.05, interactions=3,
    ),
    World(
        "valve", THUMBS, _keyed("set", "open", "half", "closed"),
        _plain(pressure="low normal high peak", flow="slow even fast", alarm="off on", unit="north south west"),
        "lines", "Reading", noise=0.25, interactions=5,
    ),
    World(
        "musik", SCORES, ("Jazz", "Klassik", "Rock", "Schlager", "Techno", "Folk", "Soul", "Stille", "Radio", "Oper"),
        _plain(ort="Auto Bad Park Büro", wer="allein Familie Gäste", zeit="früh mittags abends", wetter="Regen Sonne"),
        "json", noise=0.1,
    ),
    World(
        "dispatcher", PAIRS, tuple(f"Team {name}" for name in _words(
            "Amber Birch Cedar Dune Ember Fjord Grove Heath Iris Jade Kelp Lark Moss Nova Opal Pine Quill Reed Sage "
            "Thorn Umber Vale Wren Yarrow Zephyr"
        )),
        {
            "fault": {
                "power": ("The lights went out.", "No power since noon."),
                "water": ("Water drips from the ceiling.", "The pipe leaks."),
                "lift": ("The lift is stuck.", "The lift does not move."),
                "door": ("The front door will not lock.", "The lock is broken."),
            },
            "where": {"home": ("In my flat.", "At my house."), "shop": ("In our shop.",), "school": ("At a school.",)},
            "when": {"now": ("Please come now!",), "soon": ("This week is fine.", "There is some time.")},
        },
        "text", "Job", noise=0.1, interactions=3, vetoes=6,
    ),
)  # fmt: skip
"""Worlds kept aside: figures are reported on these."""

WORLDS: Mapping[str, World] = {world.agent: world for world in itertools.chain(TUNED, KEPT)}
