"""The conductor: plans a study's runs, works through them in processes, keeps their folder."""
