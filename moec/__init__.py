"""moec: the model compiler for Mixture-of-Experts language models."""
