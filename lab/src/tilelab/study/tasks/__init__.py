"""Tasks: what a run learns, from what, and how it is judged. ``task.py`` says how to add one."""
