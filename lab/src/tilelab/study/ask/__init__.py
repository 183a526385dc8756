"""The request of a study: its config, its choices, its designs and its runs."""
