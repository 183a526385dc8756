"""What every part of the lab uses: files, memory, child processes, the environment, drawing."""
