"""Tools for every part of the lab: files, memory, child processes, the environment, drawing."""
