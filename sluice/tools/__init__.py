"""Programs that combine packages: bench, headroom, doctor, guess, and the steps after a job's commit."""
