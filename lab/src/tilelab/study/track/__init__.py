"""Trackers, which show runs while they train; ``docs/trackers.md`` says how to add one."""
