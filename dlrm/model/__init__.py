"""The model: how tables are laid out and made smaller, and the layers that turn a batch into logits."""
