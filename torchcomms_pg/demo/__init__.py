"""Trains a small vision model with DDP over torchcomms, and again over Gloo."""
