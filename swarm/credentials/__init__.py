"""Who a peer is, and with which token it may join."""
