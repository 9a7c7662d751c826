"""Two organisations, one model: each keeps its data, and tensors and gradients travel between them."""
