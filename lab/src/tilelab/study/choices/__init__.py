"""Training choices: schedules, optimizers and attention variants, each one registered function."""
