"""What every endpoint shares: who may call it, how it is read, how it answers, how it is described."""
