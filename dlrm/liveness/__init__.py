"""Whether all ranks of a training go on, and how one ends that does not."""
