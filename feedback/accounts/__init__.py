"""Accounts: sign-in, roles, API keys and the authentication of requests."""
