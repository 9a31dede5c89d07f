"""Live experiments: assignment of units, measured values, results, verdicts, and when they end."""
