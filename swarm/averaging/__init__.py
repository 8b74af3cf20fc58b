<<<<<<< HEAD
"""Keeps a stage's peers at the same weights. The files here stand on vectors, those on wire, and those on agreement."""
=======
"""LOOP 3: the peers of one stage average what they learnt, round by round."""
>>>>>>> 10dd91dd (The code map is generated from the first sentence of each file, and checked)
