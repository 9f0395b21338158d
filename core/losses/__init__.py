"""Losses: scores and a batch in, one value a row, sample or pair out."""
