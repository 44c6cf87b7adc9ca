"""Models: build, compile, freeze, save and load them."""
