"""Example of a package that extends Ratchet, for a team that answers mails."""
