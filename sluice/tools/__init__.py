"""Programs that combine packages: bench, doctor, guess, and the steps after a job's commit."""
