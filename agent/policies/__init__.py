"""One file per policy, all behind `decide(snapshot, state) -> (knobs, state, reason)`."""
