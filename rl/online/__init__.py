"""Online learning: when agents retrain, what follows a training run, and the watch over champions."""
