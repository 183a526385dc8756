"""Looking at stored studies from the terminal: list, show, compare."""
