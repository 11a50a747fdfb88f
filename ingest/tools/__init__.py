"""Programs that measure: bench, headroom, doctor."""
