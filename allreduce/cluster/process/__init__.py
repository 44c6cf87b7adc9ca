"""This process: exit, signals, forks, children."""
