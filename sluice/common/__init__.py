"""What the programs of all packages share: options, messages, how a program ends."""
