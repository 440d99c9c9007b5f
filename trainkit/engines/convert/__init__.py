"""Weights in the formats of other engines, and back. Between any two formats lie the whole tensors
of a model by their names here (`NamedWeights`); one file a format."""
