"""Agreement among raters: statistics, the report of an agent, its page."""
