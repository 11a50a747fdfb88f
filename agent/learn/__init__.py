"""Corrects the weights of the learned policy by the user's own runs. No run imports this folder."""
