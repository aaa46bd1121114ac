"""The KV cache as values: positions, shapes, spans, the plan of a prefill and its coverage."""
