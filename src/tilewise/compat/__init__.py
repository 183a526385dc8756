"""Floor 9: other libraries' calls over ours, by their own signatures; nothing is patched here."""
