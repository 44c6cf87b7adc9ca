"""What both sides share: messages, their encoding, and the connections that carry them."""
