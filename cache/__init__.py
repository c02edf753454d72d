"""Stored decisions: records, SQLAlchemy models, the file, its layers, merging and sharing.

Nothing here knows an op, a kernel or torch: a key is a plain record and a candidate is a text. What a file holds is
data from elsewhere; it is validated when it is read and never executed.
"""
