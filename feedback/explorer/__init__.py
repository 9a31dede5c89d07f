"""Explorer of decisions: search, timelines, previews, bulk readers and pages."""
