"""What the programs of every room share: options, messages, how a program ends."""
