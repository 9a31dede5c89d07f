"""Training jobs: the queue and its workers, the entry point to training, its results and estimates."""
