"""The graph itself: nodes, tensors, specs, the operator table, names and seeds."""
