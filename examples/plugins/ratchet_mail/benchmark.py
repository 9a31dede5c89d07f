"""Benchmark `mail_tone`: a folder of items, data alone."""

from pathlib import Path

BENCHMARK = Path(__file__).parent / "mail_tone"
