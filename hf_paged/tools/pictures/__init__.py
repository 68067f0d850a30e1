"""Pictures of blocks and of who ran when, from plain lists: nothing here knows models, tensors or schedulers."""
