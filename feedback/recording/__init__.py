"""Recording of decisions: ingestion, the background recorder with its journal, traces."""
