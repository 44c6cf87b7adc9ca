"""Compare facts between ranks, and report a rank's failure to the others."""
