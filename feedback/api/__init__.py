"""The REST endpoints of feedback: decisions, ratings, comparisons, outcomes, traces, exports."""
