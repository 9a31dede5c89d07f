"""Registry of policies: stages, history, files and their integrity, model cards, evidence for the gate."""
