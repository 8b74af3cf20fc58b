"""Which peer is which, and which may join.

A peer makes a key, and its id is the key's digest (identity). In an open run it signs its certificate itself. In a
locked run an owner's key issues tokens, and a peer issues itself a certificate with its token (token). The members have
the owner's root certificate, with which they check who is a member (authority), and a table of who may do what
(rights). All are X.509 (certificates).
"""
