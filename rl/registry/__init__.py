"""Registry of policies: stages, history, files and their integrity, model cards, the evidence a gate is asked on."""
