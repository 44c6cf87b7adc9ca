"""The base class of layers, and what layers share: checks, configs, the calls under way."""
