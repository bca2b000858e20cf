"""The paged KV cache's bookkeeping: which request holds which block, and which blocks can be found again."""
