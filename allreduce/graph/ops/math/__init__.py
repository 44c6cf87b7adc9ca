"""Element-wise operators, products and reductions."""
