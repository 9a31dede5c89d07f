"""Linear policies: regularised logistic regression over features of prompt and answer. Served with numpy alone. Pure."""
