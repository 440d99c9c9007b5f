"""Saving and loading, in torch.distributed.checkpoint's format."""
