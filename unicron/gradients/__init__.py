"""The gradients of one step: buffers, accumulation over micro-batches, reduction over ranks."""
