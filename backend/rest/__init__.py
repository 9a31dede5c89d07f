"""Base of every REST endpoint: access, parsing, answers, errors and their description."""
