"""The REST endpoints of rl and the OpenAI-compatible gateway: parse, call one service, answer."""
