"""Models of the lab, each in one file, with attention as one argument."""
