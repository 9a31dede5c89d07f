"""Items of the two benchmark tasks that come with the project, drawn with a fixed seed: python benchmarks/make_tasks.py

Both ask for the skill every choice of an agent rests on and nothing an agent's raters like: name one of the options
that a prompt lists, letter by letter. The same seed writes the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

FOLDER = Path(__file__).resolve().parent.parent / "rl" / "bundled_tasks"
ITEMS = 120
SUBJECTS = {
    "folder": ("document", "folders"),
    "team": ("ticket", "teams"),
    "room": ("meeting", "rooms"),
    "route": ("parcel", "routes"),
    "label": ("photo", "labels"),
    "shelf": ("book", "shelves"),
}
FIRST = (
    *"North South Upper Lower Green Silver Amber Quiet Second Marble Cedar Harbour".split(),
    *("Copper", "Winter", "Garden", "Lantern", "Velvet", "Granite", "Hollow", "Meadow", "Orchard", "Saffron"),
    *("Thistle", "Willow"),
)
SECOND = (
    *"Office Gallery Depot Archive Annex Terrace Market Studio Bridge Cabinet Station".split(),
    *("Library", "Cellar", "Pavilion", "Workshop", "Corner", "Landing", "Passage", "Rotunda", "Stables"),
)
THINGS = (
    *"letter invoice report contract drawing sample receipt notice survey postcard".split(),
    *("recipe", "ledger"),
)


def name(random: Random) -> str:
    """A made-up name of two words, sometimes with a number."""
    found = f"{random.choice(FIRST)} {random.choice(SECOND)}"
    return f"{found} {random.randint(2, 99)}" if random.random() < 0.3 else found


def prompt(random: Random) -> tuple[str, list[str]]:
    """A prompt that lists two to five options, and the options."""
    subject, (asked, listed) = random.choice(list(SUBJECTS.items()))
    options: list[str] = []
    count = random.randint(2, 5)
    while len(options) < count:
        if (option := name(random)) not in options:
            options.append(option)
    lines = "\n".join(options)
    about = f"{random.choice(THINGS)} {random.randint(100, 999)}"
    return f"Pick one listed {subject}. Answer in JSON.\n{asked}: {about}\n{listed}:\n{lines}", options


def misspelt(text: str, random: Random) -> str:
    """The text with two neighbouring letters of a word swapped, so that it is another text."""
    while True:
        place = random.randrange(1, len(text) - 2)
        first, second = text[place], text[place + 1]
        if first != second and first.isalpha() and second.isalpha():
            return text[:place] + second + first + text[place + 2 :]


def format_item(random: Random) -> dict[str, object]:
    text, options = prompt(random)
    return {"prompt": text, "options": options}


def options_item(random: Random) -> dict[str, object]:
    text, options = prompt(random)
    right = random.choice(options)
    unlisted = next(other for other in iter(lambda: name(random), None) if other not in options)
    answers = [right, misspelt(right, random), unlisted, right.split()[0]]
    random.shuffle(answers)
    choices = [json.dumps({"choice": answer}) for answer in answers]
    return {"prompt": text, "choices": choices, "label": answers.index(right)}


def main() -> None:
    for folder, item, seed in (("ratchet_format", format_item, 11), ("ratchet_options", options_item, 12)):
        random = Random(seed)
        rows = [json.dumps(item(random), ensure_ascii=False) for _ in range(ITEMS)]
        (FOLDER / folder / "items.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
        print(f"{folder}: {len(rows)} items")


if __name__ == "__main__":
    main()
