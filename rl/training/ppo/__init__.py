"""Proximal policy optimisation, ours: formulas, models on one base, rollouts, and one loop."""
