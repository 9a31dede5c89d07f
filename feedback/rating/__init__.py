"""Rating: queues of decisions and pairs to be rated, their pages and forms."""
