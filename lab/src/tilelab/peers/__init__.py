"""Ways to do one attention: ours, torch's and published ones, and what holds them to be exact."""
