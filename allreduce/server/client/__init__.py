"""The side of a program that uses a cluster: sessions, requests, placement of variables."""
