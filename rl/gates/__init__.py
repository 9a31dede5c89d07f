"""Gates: the rules a policy must pass to move up a stage, as pure functions of figures, and their report."""
