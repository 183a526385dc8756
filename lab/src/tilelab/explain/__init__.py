"""The HTML page of ``tilewise explain``."""
