"""How good a model is: AUC, other figures, and warnings about a model that learns nothing."""
