"""Named variables: scopes, the store, checkpoints, the model bank."""
