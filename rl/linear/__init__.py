"""Linear policies: regularised logistic regression over features of prompt and answer. Pure."""
