"""Figures of a sentence: what a test compares where the wording is free to change."""

import re

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def figures_of(text: str) -> list[float]:
    """Numbers of a text in their order; commas between thousands are left out."""
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]
