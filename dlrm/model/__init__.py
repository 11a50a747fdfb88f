"""Tables in, logits out."""
