"""What the programs of all packages share: options, messages, and how a program ends."""
