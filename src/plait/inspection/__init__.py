"""What is inside checkpoints, exports and files of tensors or records: names, shapes, sizes, statistics."""
