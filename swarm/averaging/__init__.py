"""LOOP 3: keeps a stage's peers at the same weights. The files here stand on vectors, those on wire, and those on
agreement.
"""
