"""The newcomer's way with a plant nursery's agent: what `benchmarks/newcomer.py` runs."""
