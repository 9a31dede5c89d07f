"""Online learning: when an agent is retrained, what follows a training run, and the watch over its champion."""
