"""Who gives wrong but ordinary numbers: contributions are compared with each other, and who is out of line again and
again is named."""
