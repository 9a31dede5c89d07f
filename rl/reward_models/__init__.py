"""Reward models: registry, judgement on held-out feedback, and their use as rewards."""
