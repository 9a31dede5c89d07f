"""Evaluation on held-out evidence: the entry point to evaluation, off-policy estimates, benchmarks, golden cases."""
