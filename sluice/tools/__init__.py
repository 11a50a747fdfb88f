"""Programs that combine packages: bench, headroom, doctor, guess, and what a job does after its commit."""
