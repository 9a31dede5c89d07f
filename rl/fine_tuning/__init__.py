"""OpenAI's fine-tuning API over training runs: uploaded files, jobs, and what their clients read."""
