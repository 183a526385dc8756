"""The commands of ``tilewise`` that need nothing but torch and numpy."""
