"""What the programs of all rooms share: options, messages, how a program ends."""
