"""The pages of rl: parse, call one service or selector, show."""
