"""What a call is: its signature, members, call site, segments and plan."""
