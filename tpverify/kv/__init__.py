"""KV cache bookkeeping on the host: slots, sequence tables and the log that keeps every rank equal. No torch."""
