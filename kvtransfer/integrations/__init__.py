"""Doors into other people's engines. Nothing in kvtransfer imports from here."""
