"""What a study is asked to do: its config, its choices, its designs and its runs."""
