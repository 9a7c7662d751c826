"""For each family of layers: the norms and weighted sums of its micro-batches' gradients."""
