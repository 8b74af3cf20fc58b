"""Which peer is which, which may join, and what they may do.

A peer makes a key, and its id is the key's digest (identity). In a locked run an owner's key issues tokens, with which
peers issue themselves certificates. Members check others by the owner's root certificate (authority), and a table says
who may do what (rights). All are X.509 (certificates).
"""
