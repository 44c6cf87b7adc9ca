"""Programs as Keras users write them; `main(library)` runs one with this library or with Keras."""
