"""Collectives over TCP, native, with one epoll thread per process."""
